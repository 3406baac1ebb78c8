//! Grid Engine by `qsub`, `qstat -xml` and `qdel`. Their output is parsed here and nowhere else.

use std::collections::BTreeMap;

use crate::engine::fill_unlisted;
use crate::engine_command::{last_line, shorten, words};
use crate::{Engine, EngineCommands, EngineError, PilotId, PilotSpec, PilotState};

/// Grid Engine, as the commands on the path reach it.
#[derive(Debug, Clone, Default)]
pub struct GridEngine {
    commands: EngineCommands,
}

impl GridEngine {
    /// With commands run like this.
    pub fn new(commands: EngineCommands) -> Self {
        Self { commands }
    }

    fn delete(&self, what: &str) -> Result<(), EngineError> {
        let deleted = self.commands.run("qdel", &words(&[what]), "");
        // A refusal may be about a job that has ended: the queue knows.
        let Err(refused) = deleted else {
            return Ok(());
        };
        let left = self.list_jobs()?;
        let is_left = left.iter().any(|job| job.is_named(what));
        if is_left { Err(refused) } else { Ok(()) }
    }

    fn list_jobs(&self) -> Result<Vec<ListedJob>, EngineError> {
        let printed = self.commands.run("qstat", &words(&["-xml"]), "")?;
        parse_queue(&printed).ok_or_else(|| EngineError::Unreadable {
            command: "qstat".to_owned(),
            printed: shorten(&printed),
        })
    }
}

impl Engine for GridEngine {
    fn check(&self, pilot: &PilotSpec) -> Result<(), EngineError> {
        let arguments = [words(&["-w", "v"]), submit_arguments(pilot)].concat();
        self.commands.run("qsub", &arguments, "").map(drop)
    }

    fn submit(&self, pilot: &PilotSpec) -> Result<PilotId, EngineError> {
        let arguments = [words(&["-terse"]), submit_arguments(pilot)].concat();
        let output = self.commands.run_for_output("qsub", &arguments, "")?;
        let submitted = parse_submitted(&output.stdout, &output.stderr);
        submitted.ok_or_else(|| EngineError::Failed {
            command: "qsub".to_owned(),
            said: find_reason(&output.stderr),
        })
    }

    fn poll(&self, ids: &[PilotId]) -> Result<BTreeMap<PilotId, PilotState>, EngineError> {
        let jobs = self.list_jobs()?.into_iter();
        let listed = jobs.map(|job| (job.id, job.state)).collect();
        Ok(fill_unlisted(ids, listed))
    }

    fn cancel(&self, id: &PilotId) -> Result<(), EngineError> {
        self.delete(&id.0)
    }

    fn cancel_named(&self, name: &str) -> Result<(), EngineError> {
        self.delete(name)
    }
}

fn submit_arguments(pilot: &PilotSpec) -> Vec<String> {
    let log = pilot.log.display().to_string();
    let mut arguments = words(&["-N", &pilot.name, "-j", "y", "-o", &log, "-b", "n"]);
    // The path of the program and of the identity is the same there; SIGUSR2 comes before SIGKILL.
    arguments.extend(words(&["-S", "/bin/sh", "-notify"]));
    if let Some(limit_s) = pilot.time_limit_s {
        arguments.extend(["-l".to_owned(), format!("h_rt={limit_s}")]);
    }
    arguments.extend(pilot.options.iter().cloned());
    arguments.push(pilot.script.display().to_string());
    arguments
}

/// The id that `-terse` prints alone, or what Grid Engine says instead where it warns of something:
/// `Your job ID ("NAME") has been submitted`.
fn parse_submitted(stdout: &str, stderr: &str) -> Option<PilotId> {
    let is_number = |text: &&str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let alone = stdout.lines().map(str::trim).rfind(is_number);
    let in_words = || {
        let all = stdout.lines().chain(stderr.lines());
        let told = all.filter_map(|line| line.trim().strip_prefix("Your job "));
        told.filter_map(|rest| rest.split(' ').next())
            .find(is_number)
    };
    alone.or_else(in_words).map(|id| PilotId(id.to_owned()))
}

/// The line that says why, before `Exiting.`
fn find_reason(stderr: &str) -> String {
    let lines = stderr.lines().filter(|line| line.trim() != "Exiting.");
    last_line(&lines.collect::<Vec<_>>().join("\n"))
}

#[derive(Debug, PartialEq, Eq)]
struct ListedJob {
    id: PilotId,
    name: String,
    state: PilotState,
}

impl ListedJob {
    fn is_named(&self, text: &str) -> bool {
        self.id.0 == text || self.name == text
    }
}

/// Jobs of `qstat -xml`. Nothing if the text is of another form.
fn parse_queue(printed: &str) -> Option<Vec<ListedJob>> {
    if !printed.contains("</job_info>") {
        return None;
    }
    let jobs = printed.split("<job_list ").skip(1);
    jobs.map(|job| {
        let id = element(job, "JB_job_number")?;
        let state = parse_state(element(job, "state")?);
        let name = element(job, "JB_name").unwrap_or_default().to_owned();
        Some(ListedJob {
            id: PilotId(id.to_owned()),
            name,
            state,
        })
    })
    .collect()
}

/// Text of the first element of this name. Names and states of jobs have no character that XML
/// would escape.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (value, _) = rest.split_once(&format!("</{name}>"))?;
    Some(value.trim())
}

/// Letters of qstat(1): `qw`, `hqw`, `r`, `t`, `Rr`, `dr`, `Eqw`, …
fn parse_state(letters: &str) -> PilotState {
    if letters.contains('d') {
        return PilotState::Ending;
    }
    let is_running = letters.contains(['r', 't', 's', 'S', 'T']) && !letters.contains('q');
    if is_running {
        PilotState::Running { left_s: None }
    } else if letters.contains('E') {
        // It waits for a person who clears the error.
        PilotState::Ended
    } else {
        PilotState::Waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Son of Grid Engine 8.1.9 of Debian 12: two running jobs, one waiting.
    const QUEUE: &str = include_str!("recorded/qstat.xml");

    #[test]
    fn recorded_queue_is_understood() {
        let jobs = parse_queue(QUEUE).expect("it is of the form");
        let states: Vec<_> = jobs
            .iter()
            .map(|job| (job.id.0.as_str(), job.state))
            .collect();
        let running = PilotState::Running { left_s: None };
        let expected = [("6", running), ("7", running), ("8", PilotState::Waiting)];
        assert_eq!(states, expected);
        assert!(jobs.iter().all(|job| job.is_named("bafs-x")));
    }

    #[test]
    fn foreign_text_is_no_queue() {
        assert_eq!(parse_queue("error: commlib error"), None);
        assert_eq!(parse_queue("<job_info></job_info>"), Some(Vec::new()));
    }

    /// Recorded: with a warning, `-terse` prints no id.
    #[test]
    fn submitted_id_survives_a_warning() {
        let warned = "Unable to run job: warning: root's job is not allowed to run in any queue\n\
                      Your job 2 (\"bafs-x\") has been submitted\nExiting.\n";
        let id = |text: &str| Some(PilotId(text.to_owned()));
        assert_eq!(parse_submitted("", warned), id("2"));
        assert_eq!(parse_submitted("17\n", ""), id("17"));
    }

    #[test]
    fn refusal_says_why() {
        let refused = "Unable to run job: unknown resource \"bogus\"\nExiting.\n";
        assert_eq!(parse_submitted("", refused), None);
        assert_eq!(
            find_reason(refused),
            "Unable to run job: unknown resource \"bogus\""
        );
    }

    #[test]
    fn letters_are_states() {
        let running = PilotState::Running { left_s: None };
        let cases = [
            ("qw", PilotState::Waiting),
            ("hqw", PilotState::Waiting),
            ("Rq", PilotState::Waiting),
            ("t", running),
            ("Rr", running),
            ("dr", PilotState::Ending),
            ("Eqw", PilotState::Ended),
        ];
        for (letters, state) in cases {
            assert_eq!(parse_state(letters), state, "{letters}");
        }
    }
}
