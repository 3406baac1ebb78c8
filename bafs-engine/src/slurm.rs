//! Slurm by `sbatch`, `squeue` and `scancel`. Their plain text is parsed here and nowhere else; the
//! layout of `--json` differs between versions.

use std::collections::BTreeMap;

use crate::engine::fill_unlisted;
use crate::engine_command::{shorten, words};
use crate::{Engine, EngineCommands, EngineError, PilotId, PilotSpec, PilotState};

/// Slurm, as the commands on the path reach it.
#[derive(Debug, Clone, Default)]
pub struct Slurm {
    commands: EngineCommands,
}

impl Slurm {
    /// With commands run like this.
    pub fn new(commands: EngineCommands) -> Self {
        Self { commands }
    }
}

impl Engine for Slurm {
    fn check(&self, pilot: &PilotSpec) -> Result<(), EngineError> {
        let arguments = [words(&["--test-only"]), submit_arguments(pilot)].concat();
        self.commands.run("sbatch", &arguments, "").map(drop)
    }

    fn submit(&self, pilot: &PilotSpec) -> Result<PilotId, EngineError> {
        let arguments = [words(&["--parsable"]), submit_arguments(pilot)].concat();
        let printed = self.commands.run("sbatch", &arguments, "")?;
        parse_submitted(&printed).ok_or_else(|| EngineError::Unreadable {
            command: "sbatch".to_owned(),
            printed: shorten(&printed),
        })
    }

    fn poll(&self, ids: &[PilotId]) -> Result<BTreeMap<PilotId, PilotState>, EngineError> {
        // Of one unknown id in `--jobs`, squeue says nothing but an error.
        let arguments = words(&["-h", "--me", "-o", "%i %T %L"]);
        let printed = self.commands.run("squeue", &arguments, "")?;
        let listed = parse_queue(&printed).ok_or_else(|| EngineError::Unreadable {
            command: "squeue".to_owned(),
            printed: shorten(&printed),
        })?;
        Ok(fill_unlisted(ids, listed))
    }

    fn cancel(&self, id: &PilotId) -> Result<(), EngineError> {
        self.commands.run("scancel", &words(&[&id.0]), "").map(drop)
    }

    fn cancel_named(&self, name: &str) -> Result<(), EngineError> {
        let arguments = words(&["--me", "--name", name]);
        self.commands.run("scancel", &arguments, "").map(drop)
    }
}

fn submit_arguments(pilot: &PilotSpec) -> Vec<String> {
    let mut arguments = vec![
        format!("--job-name={}", pilot.name),
        "--nodes=1".to_owned(),
        "--ntasks=1".to_owned(),
        format!("--output={}", pilot.log.display()),
        "--open-mode=append".to_owned(),
    ];
    if let Some(limit_s) = pilot.time_limit_s {
        arguments.push(format!("--time={}", format_limit(limit_s)));
    }
    arguments.extend(pilot.options.iter().cloned());
    arguments.push(pilot.script.display().to_string());
    arguments
}

/// `H:MM:SS`, of which Slurm itself counts whole minutes.
fn format_limit(limit_s: u64) -> String {
    let (hours, rest) = (limit_s / 3_600, limit_s % 3_600);
    format!("{hours}:{:02}:{:02}", rest / 60, rest % 60)
}

/// `ID` or `ID;CLUSTER`.
fn parse_submitted(printed: &str) -> Option<PilotId> {
    let line = printed
        .lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty())?;
    let id = line.split(';').next()?;
    let is_number = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| PilotId(id.to_owned()))
}

/// Lines of `ID STATE LEFT`. Nothing if a line is not of this form.
fn parse_queue(printed: &str) -> Option<BTreeMap<PilotId, PilotState>> {
    let lines = printed.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let mut fields = line.split_whitespace();
            let (id, state, left) = (fields.next()?, fields.next()?, fields.next()?);
            Some((PilotId(id.to_owned()), parse_state(state, left)))
        })
        .collect()
}

/// States of squeue(1). What is neither waiting nor over holds its node.
fn parse_state(state: &str, left: &str) -> PilotState {
    match state {
        "PENDING" | "REQUEUED" | "REQUEUE_FED" | "REQUEUE_HOLD" | "RESV_DEL_HOLD"
        | "SPECIAL_EXIT" | "CONFIGURING" => PilotState::Waiting,
        "COMPLETING" | "SIGNALING" | "STAGE_OUT" => PilotState::Ending,
        "BOOT_FAIL" | "CANCELLED" | "COMPLETED" | "DEADLINE" | "FAILED" | "NODE_FAIL"
        | "OUT_OF_MEMORY" | "PREEMPTED" | "REVOKED" | "TIMEOUT" => PilotState::Ended,
        _ => PilotState::Running {
            left_s: parse_time(left),
        },
    }
}

/// Seconds of `D-HH:MM:SS`, `HH:MM:SS` or `M:SS`; nothing for `UNLIMITED`, `NOT_SET`, `INVALID`.
fn parse_time(text: &str) -> Option<u64> {
    let (days, clock) = match text.split_once('-') {
        Some((days, clock)) => (days.parse::<u64>().ok()?, clock),
        None => (0, text),
    };
    let numbers: Option<Vec<u64>> = clock.split(':').map(|part| part.parse().ok()).collect();
    let numbers = numbers?;
    if numbers.len() < 2 || numbers.len() > 3 {
        return None;
    }
    let seconds = numbers.iter().fold(0, |sum, number| sum * 60 + number);
    Some(days * 86_400 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slurm 22.05.8 of Debian 12, with running, ended, requeued, held and array jobs.
    const QUEUE: &str = include_str!("recorded/squeue.txt");

    fn state_of(id: &str) -> Option<PilotState> {
        let queue = parse_queue(QUEUE).expect("it is of the form");
        queue.get(&PilotId(id.to_owned())).copied()
    }

    #[test]
    fn recorded_queue_is_understood() {
        let running = |left_s| Some(PilotState::Running { left_s });
        assert_eq!(state_of("2"), running(Some(3_598)));
        assert_eq!(state_of("1"), running(Some(118)));
        assert_eq!(state_of("18"), Some(PilotState::Waiting));
        assert_eq!(state_of("4"), Some(PilotState::Ending));
        assert_eq!(state_of("20"), Some(PilotState::Waiting));
        assert_eq!(state_of("21_[1-2]"), Some(PilotState::Waiting));
        assert_eq!(state_of("999"), None);
    }

    #[test]
    fn foreign_text_is_no_queue() {
        assert_eq!(parse_queue("slurm_load_jobs error\n"), None);
        assert_eq!(parse_queue("\n"), Some(BTreeMap::new()));
    }

    #[test]
    fn submitted_id_may_name_a_cluster() {
        let id = |text: &str| Some(PilotId(text.to_owned()));
        assert_eq!(parse_submitted("22\n"), id("22"));
        assert_eq!(parse_submitted("22;west\n"), id("22"));
        assert_eq!(parse_submitted("a site's greeting\n23\n"), id("23"));
        assert_eq!(parse_submitted(""), None);
        assert_eq!(parse_submitted("Submitted batch job 22\n"), None);
    }

    #[test]
    fn times_left_are_read_in_each_form() {
        assert_eq!(parse_time("3-02:00:00"), Some(266_400));
        assert_eq!(parse_time("59:58"), Some(3_598));
        assert_eq!(parse_time("1:00:00"), Some(3_600));
        for none in ["UNLIMITED", "NOT_SET", "INVALID", "", "5"] {
            assert_eq!(parse_time(none), None, "{none}");
        }
    }

    #[test]
    fn options_of_the_user_come_last() {
        let pilot = PilotSpec {
            name: "p".to_owned(),
            script: "/pool/pilot".into(),
            log: "/pool/log".into(),
            time_limit_s: Some(7_265),
            options: words(&["--partition=p1", "--time=5"]),
        };
        let arguments = submit_arguments(&pilot).join(" ");
        let end = "--time=2:01:05 --partition=p1 --time=5 /pool/pilot";
        assert!(arguments.ends_with(end), "{arguments}");
    }
}
