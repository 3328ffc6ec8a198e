"""Finding texts: BM25, beside which a trained retriever is measured."""
