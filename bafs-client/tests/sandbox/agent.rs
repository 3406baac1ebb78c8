//! The agent's role in the tests: enters the private name space, mounts stand-ins for volumes,
//! runs one job, does to it what the test asks, and writes the report. Judges nothing.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{env, thread};

use bafs_client::sandbox::{
    InputSource, JobControl, JobPlan, JobStreams, OutputTarget, Privilege, Sandbox, SandboxReport,
    check_host, enter_private,
};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{SigSet, Signal};
use serde::{Deserialize, Serialize};

/// The first argument that makes this program an agent.
pub(crate) const ROLE: &str = "agent";

/// What the test wants.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AgentTask {
    /// The job; a source `@N` is the N-th stand-in volume.
    pub(crate) plan: JobPlan,
    /// How many stand-in volumes to mount; each holds a file `name`.
    pub(crate) mounts: usize,
    /// What to do once the file `ready` exists in the agent's directory.
    pub(crate) action: JobAction,
    /// The job's output; by default files `out` and `err` in the agent's directory.
    pub(crate) outputs: Option<(PathBuf, PathBuf)>,
    /// The job's standard input.
    pub(crate) input: Option<PathBuf>,
}

/// What to do to a job that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum JobAction {
    Nothing,
    Signal(i32),
    /// Send it before the job can have started.
    SignalAtOnce(i32),
    Kill,
    /// Kill it before it can have started.
    KillAtOnce,
}

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AgentResult {
    pub(crate) privilege: Privilege,
    pub(crate) report: SandboxReport,
    /// How long the kill took.
    pub(crate) kill_time: Option<Duration>,
}

pub(crate) fn main() -> ExitCode {
    let directory = PathBuf::from(env::args_os().nth(2).expect("the agent's directory"));
    let result = match env::args().nth(3).as_deref() {
        Some("check") => Ok(serde_json::to_vec(&check_host()).unwrap()),
        _ => run(&directory).map(|answer| serde_json::to_vec(&answer).unwrap()),
    };
    match result {
        Ok(answer) => {
            // Renamed into place, so that the test never reads half of it.
            fs::write(directory.join("answer.part"), answer).unwrap();
            fs::rename(directory.join("answer.part"), directory.join("answer")).unwrap();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(directory: &Path) -> Result<AgentResult, String> {
    let text = fs::read(directory.join("task")).unwrap();
    let mut task: AgentTask = serde_json::from_slice(&text).unwrap();
    // As an interactive agent does: Ctrl-C is the job's to judge.
    let mut interrupt = SigSet::empty();
    interrupt.add(Signal::SIGINT);
    interrupt.thread_block().unwrap();
    // As the search for volumes leaves them: a thread that is ending.
    thread::spawn(|| thread::sleep(Duration::from_millis(50)));
    let privilege = enter_private().map_err(|error| error.to_string())?;
    let sandbox = Sandbox::prepare(privilege).map_err(|error| error.to_string())?;
    let mounted: Vec<_> = (0..task.mounts)
        .map(|number| mount_one(&sandbox, number))
        .collect();
    for volume in &mut task.plan.volumes {
        if let Some(number) = volume
            .source
            .to_str()
            .and_then(|text| text.strip_prefix('@'))
        {
            volume.source = mounted[number.parse::<usize>().unwrap()].clone();
        }
    }
    // A descriptor that survives `exec`, as careless libraries make them.
    let _leaky = nix::unistd::dup(File::open("/etc/passwd").unwrap()).unwrap();

    let streams = streams(&task, directory);
    let job = sandbox
        .start(task.plan, streams)
        .map_err(|error| error.to_string())?;
    let kill = apply_action(task.action, &job.control(), &directory.join("ready"));
    Ok(AgentResult {
        privilege,
        report: job.wait(),
        kill_time: kill,
    })
}

fn mount_one(sandbox: &Sandbox, number: usize) -> PathBuf {
    let at = sandbox.mount_point().unwrap();
    mount(
        Some("volume"),
        &at,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("mode=1777"),
    )
    .unwrap();
    fs::write(at.join("name"), format!("volume {number}\n")).unwrap();
    at
}

fn streams(task: &AgentTask, directory: &Path) -> JobStreams {
    let create =
        |name| OutputTarget::Descriptor(File::create(directory.join(name)).unwrap().into());
    let (stdout, stderr) = match &task.outputs {
        Some((out, err)) => (
            OutputTarget::Path(out.clone()),
            OutputTarget::Path(err.clone()),
        ),
        None => (create("out"), create("err")),
    };
    let stdin = task.input.as_ref().map_or(InputSource::Null, |path| {
        InputSource::Descriptor(File::open(path).unwrap().into())
    });
    JobStreams {
        stdin,
        stdout,
        stderr,
    }
}

fn apply_action(then: JobAction, control: &JobControl, ready: &Path) -> Option<Duration> {
    if matches!(then, JobAction::Signal(_) | JobAction::Kill) {
        while !ready.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        if then == JobAction::Kill {
            // The job can be faster than the news of its start.
            thread::sleep(Duration::from_millis(100));
        }
    }
    let started = clock();
    match then {
        JobAction::SignalAtOnce(number) => {
            control.signal(Signal::try_from(number).unwrap()).unwrap()
        }
        JobAction::Nothing => return None,
        JobAction::Signal(number) => control.signal(Signal::try_from(number).unwrap()).unwrap(),
        JobAction::Kill | JobAction::KillAtOnce => control.kill("the test says so").unwrap(),
    }
    Some(clock() - started)
}

#[allow(clippy::disallowed_methods, reason = "kills are measured for real")]
pub(crate) fn clock() -> Instant {
    Instant::now()
}
