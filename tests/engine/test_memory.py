"""What a process holds at its peak, with either backend: at most 1.25 times the checkpoint.

On `medium`, beside which torch's own few hundred megabytes are small.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kdecode.model.synthesis import make_checkpoint

LIMIT = 1.25
_CHILD = """
import json, re, sys
from pathlib import Path
from kdecode import LLM, EngineConfig
from kdecode.engine.request import SamplingParams

def peak():
    # Not ru_maxrss, which starts at what the parent process had.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

llm = LLM(sys.argv[1], EngineConfig(decode_backend=sys.argv[2], max_context_tokens=256))
llm.generate([[1, 2, 3, 4]] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
print(json.dumps({"peak": peak(), "caches": llm.stats()["cache_bytes"]}))
"""


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("memory") / "medium"
    make_checkpoint(directory, "medium", seed=0)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_peak_memory(medium: Path, backend: str) -> None:
    command = [sys.executable, "-P", "-c", _CHILD, str(medium), backend]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout)
    size = sum(file.stat().st_size for file in medium.glob("*.safetensors"))
    print(backend, (result["peak"] - result["caches"]) / size)
    assert result["peak"] - result["caches"] < LIMIT * size
