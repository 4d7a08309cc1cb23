"""What users see, save and load of the optimizer state, which flows between the local optimizers and one state dict.

Out: ``view`` shows this rank's part under the public parameters, and ``consolidate`` brings all parts to one rank, as
JSON and tensors of ``serialization``. In: ``load`` checks a state dict with ``schema`` and installs what a rank owns.
"""
