"""The ways to checkpoint, one class each, and the state that ``everystep bench`` saves with them.

Those of a framework that is not PyTorch are in `everystep_study.frameworks`, beside its trainings.

| module | what it owns |
|---|---|
| `mechanism` | `Mechanism`, what it saves (`Subject`), and Everystep's `Checkpointer` in its modes |
| `plain` | those that need no framework: the raw device, `everystep.save`, pickle, numpy's, joblib's |
| `torch_mechanisms` | those of PyTorch: `torch.save`, DCP, safetensors |
| `competitors` | which of them ``everystep bench`` compares |
| `states` | flat states and their sizes; the sizes of a GPT-2; comparing arrays |
| `raw_device` | the device's own speed |
"""
