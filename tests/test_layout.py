"""The rules by which three top-level folders become one import name."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("samplers", "models", "eval")
SOURCES = [
    path
    for top in ("dlm_decode", *LINKED)
    for path in (ROOT / top).rglob("*.py")
    if (ROOT / top / "data") not in path.parents
]
SOURCES = sorted({path.resolve() for path in SOURCES})
LIBRARIES = {
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "einops",
    "wandb",
    "types",
    "profile",
    "tokenizers",
    "numpy",
}


def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_packages_are_the_folders_with_an_init():
    found = {"dlm_decode"}
    for top in ("dlm_decode", *LINKED):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.resolve().parent.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "dlm_decode" else ("dlm_decode", *parts)))
    assert found == set(settings()["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("name", LINKED)
def test_links_point_to_the_real_folders(name):
    link = ROOT / "dlm_decode" / name
    if not link.exists():
        pytest.skip("a checkout without symbolic links; install it with pip install -e .")
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_absolute_and_names_are_no_libraries(path):
    assert path.stem not in LIBRARIES
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            assert (node.module or "").split(".")[0] not in LINKED
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & set(LINKED)


def test_importing_the_package_is_light():
    import subprocess

    code = (
        "import sys, dlm_decode, dlm_decode.cli; "
        "print(sorted({'torch', 'transformers', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_ignored_link_folders_stay_ignored():
    assert {f"dlm_decode/{name}" for name in LINKED} <= set(
        settings()["tool"]["ruff"]["extend-exclude"]
    )


def test_committed_weights_stay_small():
    weights = [
        path for top in ("dlm_decode", "tests") for path in (ROOT / top).rglob("*.safetensors")
    ]
    shipped = [path for path in weights if "golden" not in path.parts]
    assert sum(path.stat().st_size for path in shipped) < 10 * 2**20
    text = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==", text, re.MULTILINE)
