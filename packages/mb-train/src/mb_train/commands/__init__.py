"""What `mb-train` does: `train` with the flags of a run alone, and the commands beside it, by name.

Each takes its parser and its words, and returns an exit code. torch is imported only by those that
need it, once their arguments make sense. Most run in one process: see `ON_ALL_RANKS`.
"""

from mb_train.commands import convert, doctor, finetune, inference, plan, report, retrieval
from mb_train.flags.parser import Command

COMMANDS: dict[str, Command] = {
    "doctor": doctor.doctor,
    "plan": plan.plan,
    "report": report.report,
    "generate": inference.generate,
    "eval": inference.evaluate,
    "serve": inference.serve,
    "convert": convert.convert,
    "upcycle": convert.upcycle,
    "finetune": finetune.finetune,
    "index": retrieval.index,
    "retrieve": retrieval.retrieve,
}
# Of several ranks that torchrun made, the first runs the others, which need one.
ON_ALL_RANKS = frozenset({"finetune"})
