"""Fields of the models that read sentences: BERT, T5, the retriever (ICT) and the classifier."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, flag

TASKS = ("mnli", "qqp", "race")


@dataclass(frozen=True, kw_only=True)
class MaskingFields:
    """How samples of BERT, T5 and the retriever (ICT) are made, and its two towers."""

    mask_prob: float = flag(
        "share of tokens that are masked",
        0.15,
        bounds=FRACTION,
        on_load="fixed",
        needs=("model", "bert", "t5"),
    )
    mean_noise_span_length: float = flag(
        "words of a span that is taken out for a T5, in the mean, before spans of more than 10 are "
        "cut to 10 (ours)", 5.0, bounds=AT_LEAST_1, on_load="fixed", needs=("model", "t5"),
    )  # fmt: skip
    short_seq_prob: float = flag(
        "share of samples that are shorter than the sequence length", 0.1, bounds=SHARE,
        on_load="fixed", needs=("model", "bert", "t5"),
    )  # fmt: skip
    samples_per_sequence: int = flag(
        "lay up to so many short samples of a BERT or a T5 into one sequence, each of which sees "
        "itself alone (ours)", 1, bounds=AT_LEAST_1, on_load="fixed", needs=("model", "bert", "t5"),
    )  # fmt: skip
    titles_data_path: str | None = flag(
        "titles of the documents, for the retriever; default PREFIX_title_document, or else "
        "PREFIX_title_sentence, beside PREFIX_text_sentence, if it is there",
        needs=("model", "ict"),
    )
    query_in_block_prob: float = flag(
        "how often a query stays in its block",
        0.1,
        bounds=SHARE,
        on_load="fixed",
        needs=("model", "ict"),
    )
    use_one_sent_docs: bool = flag(
        "take documents of one sentence as well", False, on_load="fixed", needs=("model", "ict")
    )
    biencoder_projection_dim: int = flag(
        "width of the embeddings; 0 takes the hidden size", 0, bounds=AT_LEAST_0, on_load="model",
        also=("--ict-head-size",), needs=("model", "ict"),
    )  # fmt: skip
    biencoder_shared_query_context_model: bool = flag(
        "one tower for queries and contexts",
        False,
        on_load="model",
        needs=("model", "ict"),
    )
    bert_load: str | None = flag(
        "run of a BERT that the towers, or a classifier, begin from", on_load="own",
        needs=("model", "ict", "classifier"),
    )  # fmt: skip
    task: str | None = flag(
        "what a classifier learns to tell", choices=TASKS, on_load="model",
        said_as={task.upper(): task for task in TASKS},
    )  # fmt: skip
    retriever_report_topk_accuracies: list[int] | None = flag(  # noqa: RUF009
        "report how often the right context is among the first k",
        bounds=POSITIVE,
        also=("--report-topk-accuracies",),
        needs=("model", "ict"),
    )
    retriever_score_scaling: bool = flag(
        "divide scores by the root of the hidden size",
        False,
        on_load="said",
        needs=("model", "ict"),
    )
