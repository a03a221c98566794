"""Builds sdist and wheel, and imports every module of the wheel from another folder. Run by `make
package`."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import importlib, pathlib, pkgutil, sys
import dlm_decode
home = pathlib.Path(dlm_decode.__file__).resolve()
assert pathlib.Path(sys.argv[1]).resolve() in home.parents, home
modules = [m.name for m in pkgutil.walk_packages(dlm_decode.__path__, "dlm_decode.")]
for name in modules:
    importlib.import_module(name)
assert "baseline" in dlm_decode.samplers.names() and "tiny" in dlm_decode.shipped_models()
print(f"imported {len(modules)} modules of the wheel")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(folder / "dist"),
            str(ROOT),
        ]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        wheel = next((folder / "dist").glob("*.whl"))
        sdist = next((folder / "dist").glob("*.tar.gz"))
        with zipfile.ZipFile(wheel) as archive:
            tops = {entry.split("/")[0] for entry in archive.namelist()}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"dlm_decode"}, tops
        with tarfile.open(sdist) as archive:
            assert not [entry.name for entry in archive.getmembers() if entry.issym()], (
                "links in the sdist"
            )
        venv.create(folder / "env", with_pip=False)
        site = next((folder / "env").glob("lib/python*/site-packages"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        # The dependencies of the running environment are borrowed, without its editable install.
        borrowed = [path for path in sys.path if path.endswith("site-packages")]
        (site / "borrowed.pth").write_text("\n".join(borrowed))
        probe = [str(folder / "env" / "bin" / "python"), "-c", PROBE, str(site)]
        subprocess.run(probe, check=True, cwd=folder)


if __name__ == "__main__":
    main()
