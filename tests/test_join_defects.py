"""Of Join: what fails now."""

import subprocess
import sys


def test_the_import_gives_no_warning() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", "import zeroshard_integrations.join"], check=True)
