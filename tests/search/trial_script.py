"""The script of an experiment whose trials count their steps, and so show what a kill or a pause has lost."""

_TRIAL = """
import os
import time
import lp_pipe.search as ls

class Counter:
    epochs = 0

    def state_dict(self):
        return self.epochs

    def load_state_dict(self, epochs):
        self.epochs = epochs

def trial(t):
    counter = Counter()
    t.restore(counter)
    t.folder.mkdir(parents=True, exist_ok=True)
    (t.folder / "pid").write_text(str(os.getpid()))
    for step in t.steps():
        time.sleep(t.params["seconds"])
        counter.epochs += 1
        assert counter.epochs == step
        print("trained", counter.epochs)
        t.report({"loss": abs(t.params["x"] - 0.5) / step, "step": counter.epochs}, checkpoint=counter)
"""


def trial_script(make_program: str) -> str:
    """Return a script with a function `trial`, of the parameters x and seconds (of a step), and this `make_program`."""
    return f"{_TRIAL}\n{make_program}"
