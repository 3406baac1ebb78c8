//! One program on one volume while something goes wrong: starts it, watches it, ends it, and looks
//! what is left. Causes no fault but those of its own agent.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::probe::{CHECK, Keeps, PROBE, State, Work, now_ns, set};
use crate::bench::measure::Stopwatch;
use crate::stage::DATA_FILE;
use crate::{TestCluster, processes_matching, printed_text};

/// Calls after which a program counts as under way.
const UNDER_WAY: u64 = 30;

/// Time for a program to be under way, and for everything to be gone at the end.
const START: Duration = Duration::from_secs(30);
const GONE: Duration = Duration::from_secs(10);

const PAUSE: Duration = Duration::from_millis(20);

/// Bytes of a volume, as the command line says it.
const SIZE: &str = "200MB";

/// Where the program works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Job,
    Host,
}

/// How its volume is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Through the door of a node on this machine.
    Near,
    /// Over the network.
    Far,
}

/// What is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) work: Work,
    pub(super) place: Place,
    pub(super) way: Way,
}

/// What a case came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) case: String,
    /// What the program and whoever started it saw.
    pub(super) saw: String,
    /// Until the program went on, or everything of it was gone.
    pub(super) took_ms: u64,
    /// It was neither.
    pub(super) hung: bool,
    pub(super) leftovers: Vec<String>,
    pub(super) wrong_bytes: u64,
}

impl Case {
    pub(super) fn name(self) -> String {
        let place = match self.place {
            Place::Job => "job",
            Place::Host => "host",
        };
        let way = match self.way {
            Way::Near => "near",
            Way::Far => "far",
        };
        format!("{}-{place}-{way}", self.work.name())
    }

    /// A job far from its volume is answered first, and runs again should its agent die.
    fn keeps(self) -> Keeps {
        match (self.place, self.way) {
            (Place::Job, Way::Far) => Keeps::Synced,
            _ => Keeps::Closed,
        }
    }
}

/// A program that works.
#[derive(Debug)]
pub(super) struct Running {
    case: Case,
    directory: TempDir,
    agent: Child,
    /// On the host; a job's is the agent's.
    probe: Option<Child>,
    before: State,
    ended: Option<(Duration, ExitStatus)>,
    resolved: Option<Duration>,
}

impl Running {
    /// Makes a volume and has a program work on it. `tools` is the program of [`PROBE`].
    pub(super) fn start(world: &TestCluster, tools: &str, case: Case, deadline_s: u64) -> Result<Self> {
        make_volume(world, case)?;
        let directory = tempfile::tempdir()?;
        for name in ["mnt", "tmp"] {
            std::fs::create_dir(directory.path().join(name))?;
        }
        let volume = case.name();
        let mut running = Self {
            case,
            agent: Command::new("true").spawn()?,
            probe: None,
            before: State::default(),
            ended: None,
            resolved: None,
            directory,
        };
        running.agent.wait()?;
        let (seconds, work) = (deadline_s.to_string(), case.work.name());
        let (state, point) = (running.text("state"), running.text("mnt"));
        let keeps = case.keeps().name();
        let common = ["--op-deadline", &seconds, "--explain"];
        let mut command = match case.place {
            Place::Job => {
                let mount = format!("{volume}:/vol");
                let own = [
                    "--mount", &mount, "--", tools, PROBE, work, "/vol", &state, keeps,
                ];
                world.bafs_command(&[&["exec"], &common[..], &own[..]].concat())
            }
            Place::Host => world.bafs_command(&[&["mount"], &common[..], &[&volume, &point]].concat()),
        };
        command
            .env("TMPDIR", running.path("tmp"))
            .stdout(Stdio::null())
            .stderr(File::create(running.path("errors"))?);
        running.agent = command.spawn()?;
        if case.place == Place::Host {
            running.until(|it| !it.mounts().is_empty())?;
            let arguments = [PROBE, work, &point, &state, keeps];
            let errors = File::create(running.path("probe-errors"))?;
            let mut probe = Command::new(tools);
            probe
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            running.probe = Some(probe.stderr(errors).spawn()?);
        }
        running.until(|it| it.state().calls >= UNDER_WAY)?;
        let inline =
            running.errors().contains("inline") || running.errors().contains("whole files");
        let is_near = case.way == Way::Near;
        ensure!(
            inline == is_near,
            "{volume} is reached in another way: {}",
            running.errors()
        );
        Ok(running)
    }

    /// From here on counts what happens.
    pub(super) fn mark(&mut self) {
        self.before = self.state();
    }

    /// Sends its agent a signal.
    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(
            Pid::from_raw(i32::try_from(self.agent.id())?),
            signal,
        )?)
    }

    /// Looks at it, so long after the fault; whether it has come to its end.
    pub(super) fn look(&mut self, watch: &Stopwatch) -> Result<bool> {
        if self.resolved.is_some() {
            return Ok(true);
        }
        let probe_ended = match &mut self.probe {
            Some(probe) => probe.try_wait()?.is_some(),
            None => true,
        };
        if self.ended.is_none() {
            let status = self.agent.try_wait()?;
            self.ended = status.map(|status| (watch.elapsed(), status));
        }
        let is_over = self.ended.is_some() && self.mounts().is_empty() && self.probes().is_empty();
        // A full disk ends the program on the host, and nothing else.
        let full = self.state().errno == Errno::ENOSPC as u64;
        let by_itself = self.case.place == Place::Host && full && self.ended.is_none();
        if probe_ended && (is_over || by_itself) {
            self.resolved = Some(watch.elapsed());
        }
        Ok(self.resolved.is_some())
    }

    /// Whether so many calls began and returned since the fault.
    pub(super) fn goes_on(&self, calls: u64) -> bool {
        self.state().calls >= self.before.calls + calls
    }

    /// Whether a call waits longer than this.
    pub(super) fn is_stuck(&self, longest: Duration) -> bool {
        let state = self.state();
        let waits = now_ns().saturating_sub(state.began_ns);
        state.errno == 0 && state.began_ns > 0 && u128::from(waits) > longest.as_nanos()
    }

    /// Ends it, and looks what is left, and whether what was kept is there.
    pub(super) fn end(mut self, world: &TestCluster, tools: &str, hung: bool) -> Result<Found> {
        let state = self.state();
        let longest = Duration::from_nanos(state.longest_ns);
        let took = self.resolved.unwrap_or(longest);
        let saw = self.saw(&state);
        let leftovers = self.clean(hung)?;
        let wrong_bytes = state.wrong_bytes + self.check(world, tools)?;
        Ok(Found {
            case: self.case.name(),
            saw,
            took_ms: u64::try_from(took.as_millis())?,
            hung,
            leftovers,
            wrong_bytes,
        })
    }

    fn saw(&self, state: &State) -> String {
        let mut saw = match (state.errno, state.began_ns, self.ended) {
            (0, _, None) => "went on".to_owned(),
            (0, ..) => "killed".to_owned(),
            (errno, ..) => format!("{:?}", Errno::from_raw(errno as i32)),
        };
        let errors = self.errors();
        let reason = errors.lines().rev().find_map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).ok()?;
            line["reason"].as_str().map(str::to_owned)
        });
        if let Some((_, status)) = self.ended {
            saw += &match status.code() {
                Some(code) => format!("; agent: exit {code}"),
                None => "; agent: killed".to_owned(),
            };
            saw += &reason.map_or_else(String::new, |reason| format!(" {reason}"));
        }
        saw
    }

    /// Ends what still runs, in good order; what is there after that is left over.
    fn clean(&mut self, hung: bool) -> Result<Vec<String>> {
        if let Some(probe) = &mut self.probe {
            let _ = probe.kill();
        }
        let mut left = Vec::new();
        if self.ended.is_none() {
            self.signal(Signal::SIGTERM)?;
            let watch = Stopwatch::start();
            while self.agent.try_wait()?.is_none() {
                if hung || watch.elapsed() > GONE {
                    left.push("the agent did not end when it was told to".to_owned());
                    self.agent.kill()?;
                    self.agent.wait()?;
                    break;
                }
                std::thread::sleep(PAUSE);
            }
        }
        let watch = Stopwatch::start();
        while !(self.processes().is_empty() && self.mounts().is_empty()) && watch.elapsed() < GONE {
            std::thread::sleep(PAUSE);
        }
        if let Some(probe) = &mut self.probe {
            let _ = probe.try_wait()?;
        }
        left.extend(self.processes());
        left.extend(self.mounts());
        if self.mounts().is_empty() {
            for name in ["mnt", "tmp"] {
                for entry in std::fs::read_dir(self.path(name))? {
                    left.push(entry?.path().display().to_string());
                }
            }
        }
        Ok(left)
    }

    /// Bytes that the program had kept and that are wrong now, by a look in another job.
    fn check(&self, world: &TestCluster, tools: &str) -> Result<u64> {
        if self.case.work == Work::Cache {
            return Ok(0);
        }
        let mount = format!("{}:/vol:ro", self.case.name());
        let state = self.text("state");
        let args = [
            "exec", "--mount", &mount, "--", tools, CHECK, "scratch", "/vol", &state,
        ];
        let output = world.bafs_command(&args).output()?;
        let told = String::from_utf8_lossy(&output.stdout).trim().parse();
        told.with_context(|| format!("{}: {}", self.case.name(), printed_text(&output)))
    }

    fn state(&self) -> State {
        State::read(&self.path("state"))
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(self.path("errors")).unwrap_or_default()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    /// The program, which has the path of its state on its command line; without dead ones.
    fn probes(&self) -> Vec<String> {
        processes_matching(&self.text("state"))
    }

    /// All that has to do with it, the keeper of its mount included.
    fn processes(&self) -> Vec<String> {
        processes_matching(&self.directory.path().to_string_lossy())
    }

    /// In the name space of this thread, which may have its own.
    fn mounts(&self) -> Vec<String> {
        let table = std::fs::read_to_string("/proc/thread-self/mounts").unwrap_or_default();
        let place = self.text("mnt");
        let lines = table.lines().filter(|line| line.contains(&place));
        lines.map(str::to_owned).collect()
    }

    fn until(&mut self, is_so: impl Fn(&Self) -> bool) -> Result<()> {
        let watch = Stopwatch::start();
        while !is_so(self) {
            let early = self.agent.try_wait()?;
            let name = self.case.name();
            ensure!(early.is_none(), "{name} does not start: {}", self.errors());
            ensure!(
                watch.elapsed() < START,
                "{name} is not under way: {}",
                self.errors()
            );
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

fn make_volume(world: &TestCluster, case: Case) -> Result<()> {
    let name = case.name();
    let mut args = vec!["volume", "create", &name, "--node", "n1", "--size", SIZE];
    if case.work == Work::Cache {
        let path = world.home.path().join("set");
        if !path.exists() {
            std::fs::create_dir(&path)?;
            set().write_file(&path.join(DATA_FILE))?;
        }
        args.extend(["--cache", "bafs://home/set"]);
    }
    world.run_json(&args).map(drop)
}

impl Drop for Running {
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
