"""Export of policies to files that run without jaxrl: one function of arrays, as StableHLO, ONNX or numpy."""
