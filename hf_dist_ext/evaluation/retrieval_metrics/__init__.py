"""An `evaluate` module: `evaluate.load(folder of this file)`, or the class `retrieval_metrics.RetrievalMetrics`."""
