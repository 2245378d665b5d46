"""The paper's end-to-end protocol on the real engine: `jorca bench trace` as a script.

python benchmarks/trace.py --plot trace.png
python benchmarks/trace.py --closed --model gpt2 --policy orca --max-batch-size 32 --dtype float32
"""

import sys

from jorca.cli import main

if __name__ == "__main__":
    main(["bench", "trace", *sys.argv[1:]])
