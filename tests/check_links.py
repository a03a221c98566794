"""An editable install of a checkout without the links in `dlm_decode/` passes the tests.

Git on Windows checks links out as text files unless told otherwise. Run by `make links`.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/test_registry.py", "tests/test_cli.py", "tests/test_lown.py", "tests/test_vlm.py")


def main() -> None:
    """Copies the checkout, removes the links, installs it beside this environment's packages."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".venv", ".git", "build", "dist", "*.egg-info", ".*_cache")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        links = [path for path in (copy / "dlm_decode").iterdir() if path.is_symlink()]
        if not links:
            raise SystemExit("dlm_decode/ holds no links; is this a checkout without them already?")
        for link in links:
            link.unlink()
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=False)
        python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        query = "import site; print(site.getsitepackages()[0])"
        own = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
        # Borrowed packages; editable installs of this environment do not come along.
        borrowed = "\n".join(site.getsitepackages())
        Path(own.stdout.strip(), "borrowed.pth").write_text(borrowed + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", copy], check=True)
        where = "import dlm_decode.samplers as s; print(s.__file__)"
        found = subprocess.run(
            [python, "-c", where], capture_output=True, text=True, check=True, cwd=folder
        ).stdout.strip()
        if not Path(found).is_relative_to(copy.resolve()):
            raise SystemExit(f"the copy was not what was imported: {found}")
        # `python -m pytest` would put the copy's root on the path, where the links are missed.
        run = "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main(sys.argv[1:]))"
        subprocess.run([python, "-c", run, "-q", *TESTS], cwd=copy, check=True)
    print("an editable install without the links works")


if __name__ == "__main__":
    main()
