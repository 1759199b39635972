"""Cases of crashes, of the commit log, and of derived files; see `cases.py`."""

from __future__ import annotations

from tests.crash.case import Case

_EVERYWHERE = "test_B3_whatever_a_power_cut_leaves_every_acknowledged_message_is_there"
_ANY_LIFE = "test_B3_any_life_survives_a_power_cut_anywhere"
_IN_RECOVERY = "test_B3_a_power_cut_during_recovery_is_a_power_cut_like_any_other"
_SECOND = "test_B3_what_was_cut_never_comes_back_in_a_second_life"
_KILLS = "test_F25_B1_B3_B7_B8_C1_a_broker_killed_under_load_loses_alters_and_doubles_nothing"
_TORN = "test_B3_a_torn_tail_is_cut_counted_and_logged_once"
_BITS = "test_B4_any_altered_bit_of_accepted_frames_stops_the_broker_or_is_never_delivered"
_DAMAGE = "test_B4_damage_of_accepted_data_stops_the_broker_and_changes_nothing"
_CLASSES = "test_B4_every_class_of_damage_is_reported_with_its_file_and_what_a_start_will_do"
_GIVEN_UP = "test_B4_a_damaged_range_is_reported_kept_and_passed_over"
_FUZZ = "test_B4_B11_a_damaged_file_of_any_kind_ends_in_a_declared_error_or_in_the_truth"
_PLANTED = "test_a_planted_bug_is_found"
_DERIVED = "test_B11_a_derived_file_that_is_gone_or_wrong_is_made_again"

CASES: dict[str, Case] = {
    "A1": Case("killed before the write, before the sync, before the answer, after it", (_KILLS,)),
    "A2": Case(
        "the power goes at the same moments",
        (
            _EVERYWHERE,
            _ANY_LIFE,
            "test_B1_B3_B7_B8_C1_whatever_a_power_cut_leaves_of_a_broker_at_work_nothing_is_lost",
        ),
    ),
    "A3": Case(
        "the last frame is torn at a sector, its head or its body missing", (_EVERYWHERE, _TORN)
    ),
    "A4": Case(
        "of several frames in one commit a later one reached the disk, an earlier did not",
        (_EVERYWHERE,),
    ),
    "A5": Case(
        "a crash while the log goes on to its next segment",
        (_EVERYWHERE, "test_B3_a_power_cut_at_any_moment_of_it_loses_nothing"),
    ),
    "A6": Case("a frame ends with its segment, or leaves room for just a header", (_EVERYWHERE,)),
    "A7": Case(
        "a crash at every step of recovery, and recovery after that", (_IN_RECOVERY, _ANY_LIFE)
    ),
    "A8": Case(
        "after a cut, new frames of the same lengths are written, and the power goes again",
        (_SECOND,),
    ),
    "A9": Case(
        "the mark of a clean stop is there and not true, or its removal was lost",
        (_EVERYWHERE, "test_a_clean_stop_is_known_at_the_next_start_and_nothing_is_read_again"),
    ),
    "A10": Case(
        "very many restarts without a message",
        ("test_a_hundred_idle_restarts_leave_nothing_but_a_higher_epoch", _EVERYWHERE),
    ),
    "A11": Case(
        "a slot of the checkpoint is torn",
        ("test_a_slot_that_was_torn_leaves_the_other", _EVERYWHERE, _PLANTED),
    ),
    "A12": Case(
        "a request of many messages is there as a whole or not at all", (_EVERYWHERE, _KILLS)
    ),
    "B1": Case(
        "one bit of a frame's head", (_BITS, "test_B4_each_altered_bit_of_both_logs_is_found")
    ),
    "B2": Case(
        "one bit of a record, wherever",
        (_BITS, "test_B4_damage_that_appears_while_the_broker_runs_is_found_when_it_is_read"),
    ),
    "B3": Case(
        "one bit of a frame that was not synced",
        ("test_the_limit_of_B4_damage_in_the_very_last_commit_looks_torn",),
    ),
    "B4": Case(
        "one bit of the last frame that a checkpoint knows",
        ("test_B4_a_log_that_ends_below_the_checkpoint_is_damaged_not_torn",),
    ),
    "B5": Case(
        "damage in an old segment that no start reads",
        (
            "test_B4_old_damage_that_no_start_reads_is_found_too",
            "test_damage_found_at_delivery_is_loud_and_hands_out_nothing",
        ),
    ),
    "B6": Case("a page of zeros, of ones, or of another place", (_DAMAGE, _GIVEN_UP)),
    "B7": Case(
        "a segment is missing at the front, in the middle, at the end", (_DAMAGE, _GIVEN_UP)
    ),
    "B8": Case("segments are swapped, copied, or of another store", (_DAMAGE, _CLASSES)),
    "B9": Case("a segment is shorter, empty, or longer", (_CLASSES, _GIVEN_UP)),
    "B10": Case(
        "files of somebody else among ours",
        ("test_strangers_files_beside_ours_are_left_alone", _CLASSES),
    ),
    "B11": Case(
        "another length of segments is asked for than the directory has",
        ("test_B13_another_size_of_files_is_refused_and_named",),
    ),
    "B12": Case(
        "a length that is huge, nothing, or leads out of the segment",
        (
            _FUZZ,
            "test_every_single_byte_change_with_right_checksums_parses_or_is_refused",
            "test_a_length_over_the_limit_is_refused_before_the_checksum_is_counted",
        ),
    ),
    "B13": Case(
        "a frame with right checksums and a sequence that was given or left out",
        (_CLASSES, "test_B4_what_a_hole_took_is_reported_by_sequence"),
    ),
    "B14": Case(
        "content that looks like a frame, or like nothing",
        (_TORN, "test_a_damaged_frame_hides_no_frame_behind_it"),
    ),
    "B15": Case(
        "the format is missing, damaged, newer, or names another checksum",
        (
            "test_B13_another_version_is_refused_and_named",
            "test_B13_another_checksum_is_refused_and_named",
            "test_B13_any_altered_bit_of_the_format_is_refused",
            "test_B13_files_without_a_format_are_refused",
        ),
    ),
    "C1": Case(
        "queues are gone, or behind, or ahead of the log",
        ("test_B11_all_derived_files_may_be_deleted", _DERIVED, _EVERYWHERE),
    ),
    "C2": Case(
        "an entry of a queue leads elsewhere",
        (_DERIVED, "test_an_entry_that_points_elsewhere_is_found_although_its_checksum_fits"),
    ),
    "C3": Case("a queue file ends within an entry", (_DERIVED, _FUZZ)),
    "C4": Case(
        "a queue that begins above its first entry",
        (
            "test_B8_queues_that_have_lost_their_beginning_are_rebuilt_from_where_the_log_begins",
            _EVERYWHERE,
        ),
    ),
    "C5": Case(
        "thousands of queues and few files that may be open",
        (
            "test_B10_a_process_that_may_open_no_more_files_refuses_and_continues_when_it_may",
            "test_B10_idle_connections_do_not_keep_the_broker_from_its_files",
        ),
    ),
    "C6": Case(
        "the key index leads in a circle, ahead, or out of its file",
        (
            "test_entries_that_form_a_circle_end_a_search",
            "test_a_damaged_chain_is_found_by_the_search_that_meets_it",
            _FUZZ,
        ),
    ),
    "C7": Case(
        "keys that look alike to the hash, and the same key of two subjects",
        ("test_equal_hashes_are_told_apart_by_reading", "test_another_subject_or_key_is_not_found"),
    ),
    "C8": Case(
        "the disk fails the key index", ("test_a_disk_that_fails_the_index_fails_nothing_else",)
    ),
    "C9": Case(
        "both checkpoints are bad, gone, or tell of what is not there",
        (
            "test_checkpoints_that_are_gone_cost_a_longer_start_and_nothing_else",
            "test_B4_a_checkpoint_slot_is_whole_or_none",
        ),
    ),
    "C10": Case(
        "the clock is set back or far ahead, between lives and in one",
        (
            "test_times_never_go_back_also_when_the_clock_does",
            "test_setting_the_clock_of_the_machine_ends_no_lease",
            "test_a_clock_set_back_before_a_restart_keeps_no_message_from_its_group",
            "test_a_clock_set_back_moves_the_times_of_a_snapshot_with_it",
        ),
    ),
    "C11": Case(
        "a snapshot is bad, both are, or there is none",
        (
            "test_a_damaged_snapshot_leaves_the_one_before_and_more_of_the_log",
            "test_without_any_snapshot_and_with_the_first_actions_gone_the_start_is_refused",
        ),
    ),
    "C12": Case(
        "ids that were accepted after the checkpoint are sent again",
        ("test_B7_a_repeat_is_answered_with_its_first_place_also_after_a_restart", _EVERYWHERE),
    ),
}
