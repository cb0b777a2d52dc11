import pytest

from kvprof.errors import UsageError
from kvprof.methods.links import COMMON_LINKS, parse_link, parse_links


@pytest.mark.parametrize(
    ("text", "per_s", "nominal"),
    [
        # Lanes times transfers, the share that is data, and eight bits to a byte.
        ("pcie3x16", 16 * 8e9 * 128 / 130 / 8, True),
        ("pcie4x16", 16 * 16e9 * 128 / 130 / 8, True),
        ("PCIe5x16", 16 * 32e9 * 128 / 130 / 8, True),
        ("pcie5x4", 4 * 32e9 * 128 / 130 / 8, True),
        ("pcie6x16", 121e9, True),
        # Half of the 900 and 1,800 GB/s that data sheets state for both directions.
        ("nvlink4", 450e9, True),
        ("nvlink5", 900e9, True),
        ("100Gbit/s", 12.5e9, False),
        ("400Gbps", 50e9, False),
        ("200 Gb/s", 25e9, False),
        ("25GB/s", 25e9, False),
        ("2GiB/s", 2 * 1024**3, False),
        ("rdma=46.2GB/s", 46.2e9, False),
        ("host to disk=800MB/s", 0.8e9, False),
    ],
)
def test_links_have_their_speed(text: str, per_s: float, nominal: bool) -> None:
    link = parse_link(text)
    assert link.bytes_per_s == pytest.approx(per_s, rel=1e-12)
    assert link.nominal is nominal
    assert link.seconds(3 * per_s) == pytest.approx(3)


def test_a_measured_link_has_the_name_that_it_was_given() -> None:
    # Also one of a standard: what was measured is not what the standard says.
    links = parse_links(["pcie5x16", "mine=50GB/s"])
    assert [link.name for link in links] == ["pcie5x16", "mine"]
    own = parse_link("pcie5x16=54.1GB/s")
    assert (own.name, own.bytes_per_s, own.nominal) == ("pcie5x16", 54.1e9, False)
    assert [link.name for link in parse_links([])] == list(COMMON_LINKS)


@pytest.mark.parametrize(
    "text",
    [
        *("pcie9x16", "pcie5x3", "nvlink", "100", "100Gbit", "GB/s", "0GB/s", "=5GB/s", "x="),
        *("-1GB/s", "9" * 30 + "TB/s", "a" * 25 + "=1GB/s", "nvlink4=fast", ""),
    ],
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--link"):
        parse_link(text)
