//! One program on one volume during a fault: starts it, watches it, ends it, and checks for
//! leftovers. Causes no fault but those of its own agent.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::probe_program::{
    CHECK_COMMAND, Durability, PROBE_COMMAND, ProbeState, ProbeVolume, cache_content, now_ns,
};
use crate::bench::measure::Stopwatch;
use crate::cache_cluster::DATA_FILE;
use crate::{TestCluster, printed_text, processes_matching};

/// Calls after which a program counts as started.
const CALLS_BEFORE_FAULT: u64 = 30;

/// Time for a program to start, and for everything to be gone at the end.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Bytes of a volume, as an argument of the command line.
const VOLUME_SIZE: &str = "200MB";

/// Where the program works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgramLocation {
    Job,
    Host,
}

/// How its volume is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VolumeLocality {
    /// Through the door of a node on this machine.
    Local,
    /// Over the network.
    Remote,
}

/// The tested case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FaultCase {
    pub(super) work: ProbeVolume,
    pub(super) location: ProgramLocation,
    pub(super) locality: VolumeLocality,
}

/// The result of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CaseResult {
    pub(super) case: String,
    /// The observations of the program and its starter.
    pub(super) observation: String,
    /// Time until the program continued, or everything of it was gone.
    pub(super) duration_ms: u64,
    /// It was neither.
    pub(super) has_hung: bool,
    pub(super) leftovers: Vec<String>,
    pub(super) wrong_bytes: u64,
}

impl FaultCase {
    pub(super) fn name(self) -> String {
        let place = match self.location {
            ProgramLocation::Job => "job",
            ProgramLocation::Host => "host",
        };
        let way = match self.locality {
            VolumeLocality::Local => "near",
            VolumeLocality::Remote => "far",
        };
        format!("{}-{place}-{way}", self.work.name())
    }

    /// A job far from its volume is answered first, and runs again should its agent die.
    fn durability(self) -> Durability {
        match (self.location, self.locality) {
            (ProgramLocation::Job, VolumeLocality::Remote) => Durability::WhenSynced,
            _ => Durability::WhenClosed,
        }
    }
}

/// A program that works.
#[derive(Debug)]
pub(super) struct RunningCase {
    case: FaultCase,
    directory: TempDir,
    agent: Child,
    /// On the host; a job's is the agent's.
    probe: Option<Child>,
    state_before: ProbeState,
    exit: Option<(Duration, ExitStatus)>,
    resolved_after: Option<Duration>,
}

impl RunningCase {
    /// Makes a volume and has a program work on it. `tools` is the program of [`PROBE_COMMAND`].
    pub(super) fn start(
        world: &TestCluster,
        tools: &str,
        case: FaultCase,
        deadline_s: u64,
    ) -> Result<Self> {
        create_volume(world, case)?;
        let directory = tempfile::tempdir()?;
        for name in ["mnt", "tmp"] {
            std::fs::create_dir(directory.path().join(name))?;
        }
        let volume = case.name();
        let mut running = Self {
            case,
            agent: Command::new("true").spawn()?,
            probe: None,
            state_before: ProbeState::default(),
            exit: None,
            resolved_after: None,
            directory,
        };
        running.agent.wait()?;
        let (seconds, work) = (deadline_s.to_string(), case.work.name());
        let (state, point) = (running.read_text("state"), running.read_text("mnt"));
        let keeps = case.durability().name();
        let common = ["--json", "--operation-timeout", &seconds, "--explain"];
        let mut command = match case.location {
            ProgramLocation::Job => {
                let mount = format!("{volume}:/vol");
                let own = [
                    "--mount",
                    &mount,
                    "--",
                    tools,
                    PROBE_COMMAND,
                    work,
                    "/vol",
                    &state,
                    keeps,
                ];
                world.bafs_command(&[&["exec"], &common[..], &own[..]].concat())
            }
            ProgramLocation::Host => {
                world.bafs_command(&[&["mount"], &common[..], &[&volume, &point]].concat())
            }
        };
        command
            .env("TMPDIR", running.file_path("tmp"))
            .stdout(Stdio::null())
            .stderr(File::create(running.file_path("errors"))?);
        running.agent = command.spawn()?;
        if case.location == ProgramLocation::Host {
            running.wait_until(|it| !it.mounts().is_empty())?;
            let arguments = [PROBE_COMMAND, work, &point, &state, keeps];
            let errors = File::create(running.file_path("probe-errors"))?;
            let mut probe = Command::new(tools);
            probe
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            running.probe = Some(probe.stderr(errors).spawn()?);
        }
        running.wait_until(|it| it.read_state().calls_returned >= CALLS_BEFORE_FAULT)?;
        let inline = running.read_errors().contains("inline")
            || running.read_errors().contains("whole files");
        let is_near = case.locality == VolumeLocality::Local;
        ensure!(
            inline == is_near,
            "{volume} is reached in another way: {}",
            running.read_errors()
        );
        Ok(running)
    }

    /// From here on counts what happens.
    pub(super) fn mark_fault(&mut self) {
        self.state_before = self.read_state();
    }

    /// Sends its agent a signal.
    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(
            Pid::from_raw(i32::try_from(self.agent.id())?),
            signal,
        )?)
    }

    /// Checks it, so long after the fault; returns whether it has ended.
    pub(super) fn poll(&mut self, watch: &Stopwatch) -> Result<bool> {
        if self.resolved_after.is_some() {
            return Ok(true);
        }
        let probe_ended = match &mut self.probe {
            Some(probe) => probe.try_wait()?.is_some(),
            None => true,
        };
        if self.exit.is_none() {
            let status = self.agent.try_wait()?;
            self.exit = status.map(|status| (watch.elapsed(), status));
        }
        let is_over =
            self.exit.is_some() && self.mounts().is_empty() && self.probe_processes().is_empty();
        // A full disk ends the program on the host, and nothing else.
        let full = self.read_state().errno == Errno::ENOSPC as u64;
        let by_itself = self.case.location == ProgramLocation::Host && full && self.exit.is_none();
        if probe_ended && (is_over || by_itself) {
            self.resolved_after = Some(watch.elapsed());
        }
        Ok(self.resolved_after.is_some())
    }

    /// Whether so many calls began and returned since the fault.
    pub(super) fn has_progressed(&self, calls: u64) -> bool {
        self.read_state().calls_returned >= self.state_before.calls_returned + calls
    }

    /// Whether a call waits longer than this.
    pub(super) fn is_stuck(&self, longest: Duration) -> bool {
        let state = self.read_state();
        let waits = now_ns().saturating_sub(state.call_began_ns);
        state.errno == 0 && state.call_began_ns > 0 && u128::from(waits) > longest.as_nanos()
    }

    /// Ends it, and checks for leftovers and for the kept records.
    pub(super) fn finish(
        mut self,
        world: &TestCluster,
        tools: &str,
        hung: bool,
    ) -> Result<CaseResult> {
        let state = self.read_state();
        let longest = Duration::from_nanos(state.call_ns_max);
        let took = self.resolved_after.unwrap_or(longest);
        let saw = self.describe_observation(&state);
        let leftovers = self.clean_up(hung)?;
        let wrong_bytes = state.wrong_bytes + self.count_wrong_bytes(world, tools)?;
        Ok(CaseResult {
            case: self.case.name(),
            observation: saw,
            duration_ms: u64::try_from(took.as_millis())?,
            has_hung: hung,
            leftovers,
            wrong_bytes,
        })
    }

    fn describe_observation(&self, state: &ProbeState) -> String {
        let mut saw = match (state.errno, state.call_began_ns, self.exit) {
            (0, _, None) => "went on".to_owned(),
            (0, ..) => "killed".to_owned(),
            (errno, ..) => format!("{:?}", Errno::from_raw(errno as i32)),
        };
        let errors = self.read_errors();
        let reason = errors.lines().rev().find_map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).ok()?;
            line["reason"].as_str().map(str::to_owned)
        });
        if let Some((_, status)) = self.exit {
            saw += &match status.code() {
                Some(code) => format!("; agent: exit {code}"),
                None => "; agent: killed".to_owned(),
            };
            saw += &reason.map_or_else(String::new, |reason| format!(" {reason}"));
        }
        saw
    }

    /// Ends all remaining processes in order; anything present afterwards is left over.
    fn clean_up(&mut self, hung: bool) -> Result<Vec<String>> {
        if let Some(probe) = &mut self.probe {
            let _ = probe.kill();
        }
        let mut left = Vec::new();
        if self.exit.is_none() {
            self.signal(Signal::SIGTERM)?;
            let watch = Stopwatch::start();
            while self.agent.try_wait()?.is_none() {
                if hung || watch.elapsed() > CLEANUP_TIMEOUT {
                    left.push("the agent did not end when it was told to".to_owned());
                    self.agent.kill()?;
                    self.agent.wait()?;
                    break;
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        let watch = Stopwatch::start();
        while !(self.processes().is_empty() && self.mounts().is_empty())
            && watch.elapsed() < CLEANUP_TIMEOUT
        {
            std::thread::sleep(POLL_INTERVAL);
        }
        if let Some(probe) = &mut self.probe {
            let _ = probe.try_wait()?;
        }
        left.extend(self.processes());
        left.extend(self.mounts());
        if self.mounts().is_empty() {
            for name in ["mnt", "tmp"] {
                for entry in std::fs::read_dir(self.file_path(name))? {
                    left.push(entry?.path().display().to_string());
                }
            }
        }
        Ok(left)
    }

    /// Bytes that the program had kept and that are wrong now, by a look in another job.
    fn count_wrong_bytes(&self, world: &TestCluster, tools: &str) -> Result<u64> {
        if self.case.work == ProbeVolume::Cache {
            return Ok(0);
        }
        let mount = format!("{}:/vol:ro", self.case.name());
        let state = self.read_text("state");
        let args = [
            "exec",
            "--mount",
            &mount,
            "--",
            tools,
            CHECK_COMMAND,
            "scratch",
            "/vol",
            &state,
        ];
        let output = world.bafs_command(&args).output()?;
        let told = String::from_utf8_lossy(&output.stdout).trim().parse();
        told.with_context(|| format!("{}: {}", self.case.name(), printed_text(&output)))
    }

    fn read_state(&self) -> ProbeState {
        ProbeState::read(&self.file_path("state"))
    }

    fn read_errors(&self) -> String {
        std::fs::read_to_string(self.file_path("errors")).unwrap_or_default()
    }

    fn file_path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn read_text(&self, name: &str) -> String {
        self.file_path(name).to_string_lossy().into_owned()
    }

    /// The program, which has the path of its state on its command line; without dead ones.
    fn probe_processes(&self) -> Vec<String> {
        processes_matching(&self.read_text("state"))
    }

    /// All its processes, including the watchdog of its mount.
    fn processes(&self) -> Vec<String> {
        processes_matching(&self.directory.path().to_string_lossy())
    }

    /// In the name space of this thread, which may have its own.
    fn mounts(&self) -> Vec<String> {
        let table = std::fs::read_to_string("/proc/thread-self/mounts").unwrap_or_default();
        let place = self.read_text("mnt");
        let lines = table.lines().filter(|line| line.contains(&place));
        lines.map(str::to_owned).collect()
    }

    fn wait_until(&mut self, is_so: impl Fn(&Self) -> bool) -> Result<()> {
        let watch = Stopwatch::start();
        while !is_so(self) {
            let early = self.agent.try_wait()?;
            let name = self.case.name();
            ensure!(
                early.is_none(),
                "{name} does not start: {}",
                self.read_errors()
            );
            ensure!(
                watch.elapsed() < START_TIMEOUT,
                "{name} is not under way: {}",
                self.read_errors()
            );
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

fn create_volume(world: &TestCluster, case: FaultCase) -> Result<()> {
    let name = case.name();
    let mut args = vec![
        "volume",
        "create",
        &name,
        "--node",
        "n1",
        "--size",
        VOLUME_SIZE,
    ];
    if case.work == ProbeVolume::Cache {
        let path = world.home.path().join("set");
        if !path.exists() {
            std::fs::create_dir(&path)?;
            cache_content().write_file(&path.join(DATA_FILE))?;
        }
        args.extend(["--cache", "bafs://home/set"]);
    }
    world.run_json(&args).map(drop)
}

impl Drop for RunningCase {
    fn drop(&mut self) {
        // After an error on the way: nothing of it shall outlive the benchmark.
        if let Some(probe) = &mut self.probe {
            let _ = probe.kill();
            let _ = probe.wait();
        }
        if matches!(self.agent.try_wait(), Ok(None)) {
            let _ = self.agent.kill();
            let _ = self.agent.wait();
        }
    }
}
