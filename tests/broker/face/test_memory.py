"""B10: the budgets of bytes fit the memory that the process may have."""

from __future__ import annotations

import os

import pytest

from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.memory import BUDGET_BYTES_MIN, fit_budgets, memory_bytes
from qmq_broker.service.limits import ServiceLimits

MIB = 1024 * 1024
MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V1 = "9:name=systemd:/\n4:memory:/shop/broker\n1:cpu,cpuacct:/\n"


@pytest.mark.parametrize(
    ("files", "allowed_bytes"),
    [
        ({}, MACHINE_BYTES),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"}, MACHINE_BYTES),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "800\n"}, 800),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/memory.max": "700\n",
                "/sys/fs/cgroup/a/b/memory.max": "900\n",
            },
            700,
        ),
        (
            {
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/shop/broker/memory.limit_in_bytes": "600\n",
            },
            600,
        ),
        ({"/proc/self/cgroup": "nonsense\n::::\n"}, MACHINE_BYTES),
    ],
)
def test_B10_the_memory_of_a_process_is_what_its_control_groups_allow(
    files: dict[str, str], allowed_bytes: int
) -> None:
    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    assert memory_bytes(read) == allowed_bytes


def test_the_memory_of_this_process_is_known() -> None:
    assert 0 < memory_bytes() <= MACHINE_BYTES


def sum_bytes(service: ServiceLimits, face: FaceLimits) -> int:
    service_bytes = service.groups_bytes + service.commit_queue_bytes
    return service_bytes + face.bodies_bytes + face.answers_bytes


@pytest.mark.parametrize("memory", [256 * MIB, 800 * MIB, 2_000 * MIB])
def test_B10_budgets_take_half_of_the_memory_at_most(memory: int) -> None:
    service, face = fit_budgets(ServiceLimits(), FaceLimits(), memory)
    assert 0.45 * memory < sum_bytes(service, face) <= memory / 2 + BUDGET_BYTES_MIN
    shares = service.groups_bytes_per_token / service.groups_bytes
    assert shares == pytest.approx(0.5, rel=0.01)
    assert service.dead_letters_memory_bytes < service.groups_bytes / 4


def test_B10_budgets_fit_a_machine_with_enough_as_they_are() -> None:
    fitting = fit_budgets(ServiceLimits(), FaceLimits(), 4_000 * MIB)
    assert fitting == (ServiceLimits(), FaceLimits())


def test_B10_a_tiny_machine_still_takes_the_longest_request() -> None:
    service, face = fit_budgets(ServiceLimits(), FaceLimits(), MIB)
    budgets = [service.groups_bytes, service.commit_queue_bytes, face.bodies_bytes]
    assert {*budgets, face.answers_bytes} == {BUDGET_BYTES_MIN}
