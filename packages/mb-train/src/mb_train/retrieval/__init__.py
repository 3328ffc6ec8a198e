"""Finding texts: a corpus in an index, by a trained retriever; BM25, which it is measured by."""
