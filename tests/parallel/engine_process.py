"""An engine of several ranks as a program whose rank 0 has a fault.

Arguments: checkpoint, backend, size, kind, phase and stamp. Prints the processes of the others,
then how the requests ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine_faults import Fault, arm
from ranked_engines import PROMPTS, build, greedy, with_draft


def main(checkpoint: Path, backend: str, size: int, fault: Fault) -> None:
    draft = with_draft(checkpoint) if fault.phase == "verify" else None
    with build(checkpoint, backend, size, speculative=draft) as llm:
        assert llm._worker.leader is not None
        print(json.dumps(list(llm._worker.leader.processes.values())), flush=True)
        arm(fault)
        outputs = llm.generate(PROMPTS, greedy())
        print(json.dumps([output.error for output in outputs]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Fault(0, *sys.argv[4:7]))
