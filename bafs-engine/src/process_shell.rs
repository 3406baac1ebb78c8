//! Pilots as plain processes that a shell starts, here or on another machine: the scripts for that
//! shell, and what they print. A pilot leads a session of its own, and its id holds its start time,
//! so that a later process of the same number is never taken for it.

use crate::{PilotId, PilotSpec, PilotState};

/// Starts a pilot and prints its id. The variables are set before it by [`start_script`].
const START: &str = r#"
[ -r "$script" ] || { echo "no pilot script $script on this machine" >&2; exit 1; }
setsid nohup /bin/sh "$script" </dev/null >>"$log" 2>&1 &
pid=$!
start=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -d ' ' -f 20)
echo "$pid:${start:-0}"
"#;

/// Prints the state of each process that is left: `PID:START` in a line.
const LIST: &str = r#"
for pid in $pids; do
  fields=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null) || continue
  set -- $fields
  [ $# -ge 20 ] || continue
  [ "$1" = Z ] || { shift 19; echo "$pid:$1"; }
done
echo end
"#;

/// Ends the session of a process: first it is asked, after a grace it is killed.
const CANCEL: &str = r#"
is_there() {
  now=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null) || return 1
  set -- $now
  [ "$1" != Z ] || return 1
  shift 19
  [ "$1" = "$start" ]
}
is_there || exit 0
kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid"
(
  i=0
  while is_there && [ $i -lt 100 ]; do sleep 0.1; i=$((i + 1)); done
  is_there && kill -KILL -- "-$pid"
) </dev/null >/dev/null 2>&1 &
"#;

pub(crate) fn start_script(pilot: &PilotSpec) -> String {
    let script = quote(&pilot.script.display().to_string());
    let log = quote(&pilot.log.display().to_string());
    format!("script={script}\nlog={log}\n{START}")
}

pub(crate) fn list_script(ids: &[&str]) -> String {
    let pids: Vec<&str> = ids
        .iter()
        .filter_map(|id| split_id(id))
        .map(|(pid, _)| pid)
        .collect();
    format!("pids={}\n{LIST}", quote(&pids.join(" ")))
}

/// Nothing for an id that is none of ours.
pub(crate) fn cancel_script(id: &str) -> Option<String> {
    let (pid, start) = split_id(id)?;
    Some(format!("pid={pid}\nstart={start}\n{CANCEL}"))
}

/// The id that the script printed.
pub(crate) fn parse_started(printed: &str) -> Option<PilotId> {
    let line = printed
        .lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty())?;
    split_id(line).map(|_| PilotId(line.to_owned()))
}

/// State of a process among those that the script listed. Nothing if the list has no end.
pub(crate) fn find_state(printed: &str, id: &str) -> Option<PilotState> {
    let lines: Vec<&str> = printed.lines().map(str::trim).collect();
    if lines.last() != Some(&"end") {
        return None;
    }
    Some(if lines.contains(&id) {
        PilotState::Running { left_s: None }
    } else {
        PilotState::Ended
    })
}

/// Process number and start time, both checked: they become part of a script.
fn split_id(id: &str) -> Option<(&str, &str)> {
    let (pid, start) = id.split_once(':')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(pid) && is_number(start)).then_some((pid, start))
}

/// A text as one word of a shell.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_ids_reach_no_shell() {
        assert_eq!(cancel_script("1; rm -r /:2"), None);
        assert_eq!(cancel_script("-1:5"), None);
        assert!(cancel_script("12:500").is_some());
        assert_eq!(quote("it's"), r"'it'\''s'");
    }

    #[test]
    fn reused_process_number_is_another_process() {
        let printed = "12:700\nend\n";
        assert_eq!(find_state(printed, "12:500"), Some(PilotState::Ended));
        let running = PilotState::Running { left_s: None };
        assert_eq!(find_state(printed, "12:700"), Some(running));
        assert_eq!(find_state("12:700\n", "12:700"), None);
    }
}
