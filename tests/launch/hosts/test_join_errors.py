"""The error of a launch that some hosts have not joined: short, and the reason first."""

from lp_pipe.launch.engines import StartedAgent
from lp_pipe.launch.hosts.host_join import hosts_not_joined


class Agent(StartedAgent):
    def __init__(self, host: str, how: str | None = None, *lines: str) -> None:
        super().__init__([host])
        self._how, self._lines = how, list(lines)

    def how_it_ended(self) -> str | None:
        return self._how

    def last_lines(self) -> list[str]:
        return self._lines

    def kill(self) -> None: ...


def explained(*agents: Agent, refusals: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> list[str]:
    names = [name for one in agents for name in one.hosts] + [*also]
    return hosts_not_joined(names, 100, refusals, agents, 2.4, "runs/x/agents").splitlines()


def test_who_ended_says_why_and_who_is_only_late_is_said_to_be_late() -> None:
    # It said "nothing was heard of it for 60 s" of the others, after two.
    assert explained(Agent("h1"), Agent("h2", "exit status 255", "ssh: no such name"), Agent("h3"), also=("away",)) == [
        "4 of 100 hosts have not joined: h1, h2, h3, away",
        "  h2: its agent ended (exit status 255)",
        "      ssh: no such name",
        "  h1, h3, away: not there yet after 2 s, without a word",
    ]


def test_an_end_comes_before_words_on_the_way() -> None:
    assert explained(Agent("h1", None, "loading modules"), Agent("h2", "killed by SIGKILL")) == [
        "2 of 100 hosts have not joined: h1, h2",
        "  h2: its agent ended (killed by SIGKILL); it had printed nothing",
        "  h1: not there yet after 2 s",
        "      loading modules",
    ]


def test_of_a_hundred_hosts_with_the_same_trouble_a_few_are_told_of() -> None:
    many = [Agent(f"h{number}", "exit status 127", *map(str, range(5)), "no /opt/python") for number in range(99)]
    lines = explained(*many, Agent("late"), refusals=("h1 has another Python",) * 5)
    assert len(lines) <= 15
    assert lines[0].endswith("h6, h7 and 92 more")
    assert lines.count("      no /opt/python") == 3
    assert lines[-2:] == [
        "  and 96 more that said why: all that they print is in runs/x/agents",
        "  late: not there yet after 2 s, without a word",
    ]
