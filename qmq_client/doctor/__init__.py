"""The doctor: finds settings that endanger the guarantees, and says how to fix them."""

from qmq_client.doctor.catalogue import CHECKS
from qmq_client.doctor.check import Check, Severity
from qmq_client.doctor.examination import examine, examine_configured
from qmq_client.doctor.finding import Finding, Thresholds

__all__ = [
    "CHECKS",
    "Check",
    "Finding",
    "Severity",
    "Thresholds",
    "examine",
    "examine_configured",
]
