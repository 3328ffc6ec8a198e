"""What modules for further tokens learn of a batch (`models.mtp`), made beside its other arrays.

Module k learns of each token the label k places on, which counts as much as it does for the model
itself. There is none behind the end of a sequence. Nor is there one in another document, if
attention keeps documents apart: what is embedded on the way to it would be of that document.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mb_train.models.mtp import further_labels, further_positions, further_weights


def further_arrays(
    batch: dict[str, np.ndarray], count: int, *, positions: bool
) -> dict[str, np.ndarray]:
    """Labels and weights for each of `count` modules, from those of whole sequences.

    Args:
        batch: labels_BS, weights_BS and, where documents are kept apart, what says so.
        positions: they are learned, and so are to be known of further tokens too.
    """
    labels_BS, weights_BS = batch["labels_BS"], batch["weights_BS"]
    documents_BS = documents_of(batch)
    found = {}
    for k in range(1, count + 1):
        further_BS = _moved(weights_BS, k)
        if documents_BS is not None:
            further_BS = np.where(_moved(documents_BS, k) == documents_BS, further_BS, 0)
        found[further_labels(k)] = _moved(labels_BS, k)
        found[further_weights(k)] = further_BS.astype(np.float32)
        if positions:
            counted_1S = np.arange(labels_BS.shape[1])[None]
            found[further_positions(k)] = _moved(batch.get("positions_BS", counted_1S), k)
    return found


def documents_of(batch: dict[str, np.ndarray]) -> npt.NDArray[np.int64] | None:
    """Number of the document that each token is of, [B, S]; None where nothing keeps them apart."""
    if "segments_BS" in batch:
        return batch["segments_BS"]
    if "ends_BN" not in batch:
        return None
    places_S = np.arange(batch["labels_BS"].shape[1])
    return (places_S >= batch["ends_BN"][..., None]).sum(1)


def _moved(array_BS: np.ndarray, k: int) -> np.ndarray:
    """What stands k places on; 0 where nothing does."""
    moved_BS = np.zeros_like(array_BS)
    moved_BS[:, :-k] = array_BS[:, k:]
    return moved_BS
