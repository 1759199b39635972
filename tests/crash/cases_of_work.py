"""Cases of actions, delayed messages, errors, refusals and retention; see `cases.py`."""

from __future__ import annotations

from tests.crash.case import Case

_EVERYWHERE = "test_B3_whatever_a_power_cut_leaves_every_acknowledged_message_is_there"
_KILLS = "test_F25_B1_B3_B7_B8_C1_a_broker_killed_under_load_loses_alters_and_doubles_nothing"
_CALLS = "test_B5_B6_whichever_call_fails_the_broker_ends_as_documented_and_loses_nothing"
_FULL = "test_B6_on_a_full_disk_sends_are_refused_and_all_else_continues_until_there_is_room"
_PLANTED = "test_a_planted_bug_is_found"
_DELAY = "test_D1_D3_D4_hold_whatever_a_power_cut_leaves"

CASES: dict[str, Case] = {
    "D1": Case(
        "the tail of the action log is torn or lost",
        (_EVERYWHERE, "test_F30_C1_what_a_killed_broker_had_handed_out_is_settled_at_the_next_one"),
    ),
    "D2": Case(
        "damage in the middle of the action log",
        (
            "test_B4_what_stands_before_the_damage_counts_and_nothing_behind_it",
            "test_damage_in_the_action_log_is_an_exit_code_of_its_own",
        ),
    ),
    "D3": Case(
        "the log of pulls is missing or wrong",
        absent="It is not written: what was pulled is known by the action log and the snapshots.",
    ),
    "D4": Case(
        "acknowledged twice, overlapping, stale, or by nobody who has it",
        (
            "test_C3_a_late_ack_is_refused_as_stale_and_changes_nothing",
            "test_C3_an_ack_under_another_token_is_stale",
            "test_ranges_named_twice_in_one_request_are_settled_once",
            "test_an_ack_repeated_after_a_lost_answer_is_no_late_ack",
        ),
    ),
    "D5": Case(
        "a consumer dies with messages, and the broker restarts before their lease ends",
        (
            "test_a_handle_stays_good_over_a_restart_of_the_broker",
            "test_C7_the_order_holds_over_restarts_and_snapshots",
        ),
    ),
    "D6": Case(
        "a crash while a message becomes a dead letter",
        ("test_C4_a_dead_letter_keeps_reason_and_last_error_over_a_restart", _EVERYWHERE),
    ),
    "D7": Case(
        "given back with a delay, and a crash before or after that is durable",
        ("test_what_waits_for_redelivery_waits_on_after_a_restart",),
    ),
    "D8": Case(
        "a group stands behind the end of the log",
        ("test_C12_a_group_never_stands_behind_the_durable_end",),
    ),
    "D9": Case(
        "names that actions refer to are gone with their segment",
        absent="Actions carry their names themselves; nothing is referred to.",
    ),
    "E1": Case(
        "a crash between any two steps of a delayed message's way",
        (_DELAY, "test_D3_a_message_is_released_once_across_stops_and_kills"),
    ),
    "E2": Case(
        "what says which ones were released is missing or torn",
        (
            "test_B11_a_table_that_is_damaged_is_made_again",
            "test_B11_without_their_table_the_files_speak_for_themselves",
        ),
    ),
    "E3": Case(
        "a file of delayed messages is torn or damaged",
        (
            "test_B4_a_file_that_is_shorter_than_its_table_says_stops_the_broker",
            "test_B4_a_damaged_record_is_held_and_named_and_others_continue",
        ),
    ),
    "E4": Case(
        "the broker was away when they were due",
        ("test_D3_a_message_is_released_once_across_stops_and_kills",),
    ),
    "E5": Case(
        "cancelled before, while and after it is loaded, and a crash then",
        (
            "test_D4_what_was_answered_cancelled_is_never_delivered",
            "test_D4_a_cancellation_that_comes_too_late_says_so",
            _DELAY,
        ),
    ),
    "E6": Case(
        "due in the past, now, or beyond the limit",
        ("test_D1_a_time_in_the_past_is_now", "test_D5_the_limit_is_a_setting"),
    ),
    "E7": Case(
        "very many are due at once",
        (
            "test_D2_D3_very_many_due_in_one_second_take_bounded_memory_and_hold_up_no_send",
            "test_F34_D3_a_hundred_thousand_messages_due_at_one_moment_come_once_each",
        ),
    ),
    "E8": Case(
        "the clock jumps while they wait",
        (
            "test_F35_D1_messages_are_held_while_the_clock_is_back_and_come_once",
            "test_D1_a_clock_that_is_set_forward_is_followed_in_bounded_steps_with_an_alarm",
            "test_F35_D1_D3_a_broker_whose_clock_is_set_back_and_forward_releases_nothing_early_or_twice",
        ),
    ),
    "E9": Case("the log is cut behind records that were copied already", (_DELAY,)),
    "F1": Case(
        "no space, wherever it is needed",
        (
            _FULL,
            "test_B6_a_full_disk_refuses_and_continues_when_there_is_room",
            "test_B6_queues_that_find_no_room_stay_in_memory",
            "test_a_full_disk_makes_the_index_wait_and_harms_nobody",
            _CALLS,
        ),
    ),
    "F2": Case(
        "a write fails, or a sync fails once and works the next time",
        (
            "test_B5_after_a_failed_sync_nothing_is_acknowledged_any_more",
            "test_B3_B5_B6_a_life_that_is_refused_a_call_acknowledges_nothing_that_is_lost",
            _CALLS,
            _EVERYWHERE,
        ),
    ),
    "F2b": Case(
        "restarted by the same kernel after that, whose cache shows what the disk lacks",
        (_EVERYWHERE, _PLANTED),
    ),
    "F3": Case(
        "the file system refuses all writes",
        (
            _CALLS,
            "test_B5_the_first_failure_poisons_the_log",
            "test_B1_B3_B5_B7_a_disk_that_goes_read_only_under_load_ends_the_broker_and_loses_nothing",
        ),
    ),
    "F4": Case(
        "a write that is shorter than asked for",
        ("test_short_writes_are_completed", "test_a_write_that_writes_nothing_is_an_error"),
    ),
    "F5": Case(
        "a sync that takes very long", ("test_B10_too_many_bytes_waiting_for_the_disk_are_refused",)
    ),
    "F6": Case(
        "a file is cut or removed by somebody else while it is used",
        (
            "test_B1_a_lost_directory_or_file_is_found_before_the_next_answer",
            "test_B1_what_is_lost_between_writing_and_syncing_is_not_answered",
        ),
    ),
    "F7": Case(
        "a file system without preallocation, or without locks",
        (
            "test_without_preallocation_a_file_still_grows",
            "test_B9_a_file_system_without_locks_is_refused_with_a_way_out",
        ),
    ),
    "F8": Case(
        "a second process on the directory",
        (
            "test_B9_a_second_broker_is_refused_before_it_touches_anything",
            "test_F29_B9_a_second_broker_on_a_directory_refuses_and_disturbs_nobody",
        ),
    ),
    "F9": Case(
        "a process with an open store forks",
        absent="The broker starts no processes.",
    ),
    "F10": Case(
        "a read of an old segment fails, or any other",
        (
            "test_B3_B5_a_start_that_is_refused_a_call_ends_with_the_reason_and_harms_nothing",
            "test_B4_damage_that_appears_while_the_broker_runs_is_found_when_it_is_read",
            "test_damage_found_at_delivery_is_loud_and_hands_out_nothing",
        ),
    ),
    "G1": Case(
        "subjects at the limit, strange ones, and such that differ in case only",
        (
            "test_a_name_has_a_good_first_letter_good_letters_and_at_most_127",
            "test_two_subjects_have_two_folders_also_where_case_is_folded",
            "test_a_longest_subject_is_a_possible_file_name",
            "test_names_that_differ_only_in_case_are_two_subjects",
        ),
    ),
    "G2": Case(
        "bodies, headers and frames at their limits and one over",
        (
            "test_what_is_exactly_at_its_limit_is_encoded",
            "test_what_is_one_over_its_limit_is_refused_by_name",
            "test_a_frame_is_as_long_as_its_limit_and_not_longer",
        ),
    ),
    "G3": Case(
        "tags whose hashes are alike",
        ("test_two_tags_that_look_alike_to_the_hash_are_told_apart_by_the_text",),
    ),
    "G4": Case(
        "the checksum of a producer is wrong",
        (
            "test_deep_finds_a_record_whose_sender_made_a_wrong_checksum",
            "test_bad_input_is_a_refusal_that_says_why",
        ),
    ),
    "G5": Case(
        "read-only, draining, poisoned, full, busy: each is told by its name",
        (
            "test_a_broker_that_does_not_take_messages_says_in_which_state_it_is",
            "test_a_read_only_broker_refuses_messages_by_reason_and_delivers",
            _FULL,
        ),
    ),
    "G6": Case(
        "a queue in bytes that is full",
        (
            "test_B10_too_many_bytes_waiting_for_the_disk_are_refused",
            "test_F37_B10_too_many_waiting_pulls_are_asked_to_come_back",
        ),
    ),
    "G7": Case(
        "repeats of any of the last requests, alone and mixed",
        (
            "test_B7_a_frame_of_new_and_repeated_messages_stores_the_new_ones",
            "test_B7_an_id_with_other_content_refuses_its_frame_and_no_other",
            "test_the_window_knows_what_a_dictionary_would",
        ),
    ),
    "G8": Case(
        "a request that found no room is sent again",
        (
            "test_B6_a_full_disk_refuses_and_continues_when_there_is_room",
            "test_B7_a_refused_frame_leaves_its_other_ids_free",
        ),
    ),
    "G9": Case(
        "a request is sent again while the first one waits for its sync",
        ("test_B7_repeats_within_one_commit_are_known", _KILLS),
    ),
    "H1": Case(
        "a crash at any step of giving up a segment, and a reader in it",
        (_EVERYWHERE, "test_a_file_that_is_given_up_under_a_search_leaves_a_doubt"),
    ),
    "H2": Case(
        "a group or a message is older than what is kept",
        (
            "test_B12_a_segment_goes_when_it_is_old_and_every_group_has_passed_it",
            "test_B12_by_force_a_group_loses_messages_and_their_number_is_reported",
            "test_B12_what_a_group_lost_by_force_is_counted_before_it_is_moved",
        ),
    ),
    "H3": Case(
        "segments go because the log is too long",
        ("test_a_log_that_is_too_long_loses_its_oldest_segments",),
    ),
    "H4": Case(
        "the clock is wrong when segments are to go",
        ("test_times_never_go_back_also_when_the_clock_does", _EVERYWHERE),
    ),
    "H5": Case("a crash while a log is compacted", absent="No log is compacted."),
    "H6": Case(
        "copies of a log on other machines differ",
        absent="One broker owns a log; there are no copies but backups.",
    ),
}
