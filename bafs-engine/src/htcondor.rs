//! HTCondor by `condor_submit`, `condor_q -json` and `condor_rm`. Their output is parsed here and
//! nowhere else. The recorded output follows HTCondor's manual: no registry has its daemons.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::engine::fill_unlisted;
use crate::engine_command::{shorten, words};
use crate::{Engine, EngineCommands, EngineError, PilotId, PilotSpec, PilotState};

/// HTCondor, as the commands on the path reach it.
#[derive(Debug, Clone, Default)]
pub struct HtCondor {
    commands: EngineCommands,
}

impl HtCondor {
    /// With commands run like this.
    pub fn new(commands: EngineCommands) -> Self {
        Self { commands }
    }

    fn remove(&self, arguments: &[String], constraint: &str) -> Result<(), EngineError> {
        let removed = self.commands.run("condor_rm", arguments, "");
        // A refusal may be about a job that has left the queue: the queue knows.
        let Err(refused) = removed else {
            return Ok(());
        };
        let left = self.list_jobs(&words(&["-constraint", constraint]))?;
        if left.is_empty() {
            Ok(())
        } else {
            Err(refused)
        }
    }

    fn list_jobs(&self, which: &[String]) -> Result<BTreeMap<PilotId, PilotState>, EngineError> {
        let attributes = "ClusterId,ProcId,JobStatus";
        let arguments = [words(&["-json", "-attributes", attributes]), which.to_vec()].concat();
        let printed = self.commands.run("condor_q", &arguments, "")?;
        parse_queue(&printed).ok_or_else(|| EngineError::Unreadable {
            command: "condor_q".to_owned(),
            printed: shorten(&printed),
        })
    }
}

impl Engine for HtCondor {
    fn check(&self, pilot: &PilotSpec) -> Result<(), EngineError> {
        let arguments = [words(&["-dry-run", "/dev/null"]), submit_arguments(pilot)].concat();
        let description = describe_job(pilot);
        self.commands
            .run("condor_submit", &arguments, &description)
            .map(drop)
    }

    fn submit(&self, pilot: &PilotSpec) -> Result<PilotId, EngineError> {
        let arguments = [words(&["-terse"]), submit_arguments(pilot)].concat();
        let printed = self
            .commands
            .run("condor_submit", &arguments, &describe_job(pilot))?;
        parse_submitted(&printed).ok_or_else(|| EngineError::Unreadable {
            command: "condor_submit".to_owned(),
            printed: shorten(&printed),
        })
    }

    fn poll(&self, ids: &[PilotId]) -> Result<BTreeMap<PilotId, PilotState>, EngineError> {
        let which: Vec<String> = ids.iter().map(|id| id.0.clone()).collect();
        Ok(fill_unlisted(ids, self.list_jobs(&which)?))
    }

    fn cancel(&self, id: &PilotId) -> Result<(), EngineError> {
        let (cluster, process) = id.0.split_once('.').unwrap_or((&id.0, "0"));
        let constraint = format!("ClusterId == {cluster} && ProcId == {process}");
        self.remove(&words(&[&id.0]), &constraint)
    }

    fn cancel_named(&self, name: &str) -> Result<(), EngineError> {
        let constraint = format!("JobBatchName == \"{name}\"");
        self.remove(&words(&["-constraint", &constraint]), &constraint)
    }
}

fn submit_arguments(pilot: &PilotSpec) -> Vec<String> {
    let mut arguments = words(&["-batch-name", &pilot.name]);
    arguments.extend(pilot.options.iter().cloned());
    arguments.push("-".to_owned());
    arguments
}

/// A submit description. HTCondor ends a job by SIGTERM, and with it its time limit.
fn describe_job(pilot: &PilotSpec) -> String {
    let log = pilot.log.display();
    let mut text = format!(
        "universe = vanilla\nexecutable = {}\noutput = {log}\nerror = {log}\n\
         should_transfer_files = NO\nkill_sig = SIGTERM\n",
        pilot.script.display()
    );
    if let Some(limit_s) = pilot.time_limit_s {
        text += &format!(
            "periodic_remove = JobStatus == 2 && time() - JobCurrentStartDate > {limit_s}\n"
        );
    }
    text + "queue 1\n"
}

/// `FIRST - LAST` of the submitted jobs, which are one.
fn parse_submitted(printed: &str) -> Option<PilotId> {
    let line = printed
        .lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty())?;
    let id = line.split(' ').next()?;
    let (cluster, process) = id.split_once('.')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(cluster) && is_number(process)).then(|| PilotId(id.to_owned()))
}

/// Jobs of `condor_q -json`, which prints nothing for an empty queue.
fn parse_queue(printed: &str) -> Option<BTreeMap<PilotId, PilotState>> {
    if printed.trim().is_empty() {
        return Some(BTreeMap::new());
    }
    let jobs: Vec<Value> = serde_json::from_str(printed).ok()?;
    jobs.iter()
        .map(|job| {
            let number = |name: &str| job.get(name).and_then(Value::as_u64);
            let (cluster, process) = (number("ClusterId")?, number("ProcId")?);
            let state = parse_state(number("JobStatus")?);
            Some((PilotId(format!("{cluster}.{process}")), state))
        })
        .collect()
}

/// `JobStatus` of the manual: 1 idle, 2 running, 3 removed, 4 completed, 5 held, 6 transferring
/// output, 7 suspended.
fn parse_state(status: u64) -> PilotState {
    match status {
        1 => PilotState::Waiting,
        2 | 7 => PilotState::Running { left_s: None },
        6 => PilotState::Ending,
        // A held job waits for a person; the pool must not wait for it.
        _ => PilotState::Ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_of_the_manual_is_understood() {
        let printed = r#"[
{ "ClusterId": 7, "JobStatus": 2, "ProcId": 0 }
,
{ "ClusterId": 8, "JobStatus": 1, "ProcId": 0 }
,
{ "ClusterId": 9, "JobStatus": 5, "ProcId": 0 }
]"#;
        let queue = parse_queue(printed).expect("it is of the form");
        let states: Vec<_> = queue
            .iter()
            .map(|(id, state)| (id.0.as_str(), *state))
            .collect();
        let running = PilotState::Running { left_s: None };
        let expected = [
            ("7.0", running),
            ("8.0", PilotState::Waiting),
            ("9.0", PilotState::Ended),
        ];
        assert_eq!(states, expected);
    }

    #[test]
    fn empty_queue_prints_nothing() {
        assert_eq!(parse_queue(""), Some(BTreeMap::new()));
        assert_eq!(parse_queue("-- Failed to fetch ads"), None);
    }

    #[test]
    fn submitted_range_is_one_job() {
        assert_eq!(
            parse_submitted("12.0 - 12.0\n"),
            Some(PilotId("12.0".to_owned()))
        );
        assert_eq!(parse_submitted("1 job(s) submitted to cluster 12.\n"), None);
    }
}
