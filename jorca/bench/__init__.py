"""The measurements behind `jorca bench`: the paper's two protocols on the real engine."""
