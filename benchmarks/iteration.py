"""The paper's engine benchmark: `jorca bench iteration` as a script.

python benchmarks/iteration.py --model gpt2 --plot iteration.png
python benchmarks/iteration.py --model gpt2 --dtype bfloat16 --table costs.json
"""

import sys

from jorca.cli import main

if __name__ == "__main__":
    main(["bench", "iteration", *sys.argv[1:]])
