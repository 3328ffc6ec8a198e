"""`mb-train index RUN` and `mb-train retrieve RUN QUERY`: what a retriever is trained for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mb_train.flags.parser import Parser, add_run
from mb_train.folder.run_folder import checkpoint_in


def index(parser: Parser, arguments: Sequence[str]) -> int:
    """Embed a corpus, and write its index.

    Every block is embedded by a retriever (--model ict) and goes into a FAISS index; how often a
    sentence finds its block among those of other sentences is told beside BM25's.
    """
    add_run(parser)
    parser.add_argument(
        "--corpus", required=True, metavar="PREFIX",
        help="token files of the corpus, split into sentences (mb-data preprocess)",
    )  # fmt: skip
    parser.add_argument(
        "--titles", metavar="PREFIX",
        help="default PREFIX_title_document, or else PREFIX_title_sentence, beside it",
    )  # fmt: skip
    parser.add_argument("--output", help="folder of the index; default RUN/index")
    parser.add_argument(
        "--kind", default="Flat",
        help="of index, by faiss' index_factory: Flat (default), IVF1024,Flat, HNSW32, ...",
    )  # fmt: skip
    parser.add_argument(
        "--queries", type=int, default=1000,
        help="sentences whose blocks are looked for, each among the blocks of all these sentences: "
        "the more there are, the harder; default 1000",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    from mb_train.inference.retrieval import build_index

    output = _folder(options.output, options.run)
    found = build_index(
        Path(options.run),
        options.corpus,
        output,
        titles=options.titles,
        kind=options.kind,
        queries=options.queries,
        device=options.device,
    )
    for name, value in found.items():
        print(f"  {name}: {value:.4g}")
    print(f"index: {output}")
    return 0


def retrieve(parser: Parser, arguments: Sequence[str]) -> int:
    """The blocks of an indexed corpus that are nearest to a query."""
    add_run(parser)
    parser.add_argument("query", help="in words")
    parser.add_argument("--index", help="folder of the index; default RUN/index")
    parser.add_argument("-k", "--count", type=int, default=5, help="how many; default 5")
    parser.add_argument(  # 64 of IVF1024 hold a sixteenth of the blocks
        "--lists", type=int, default=64,
        help="of an index of a kind IVF...: how many of its lists to search; default 64",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    from mb_train.inference.retrieval import Retriever

    folder = _folder(options.index, options.run)
    run = Path(options.run)
    retriever = Retriever(run, folder, lists=options.lists, device=options.device)
    for place, answer in enumerate(retriever.ask(options.query, options.count), start=1):
        print(f"{place}. {answer.title} ({answer.score:.3f})\n   {answer.text}")
    return 0


def _folder(given: str | None, run: str) -> Path:
    """Of an index: RUN/index, if none is given, also where RUN is an iteration's folder."""
    return Path(given) if given else checkpoint_in(Path(run)).parent / "index"
