"""On-policy distillation: the student writes completions, and from then on they are texts like any others."""
