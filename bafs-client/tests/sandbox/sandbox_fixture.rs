//! What every case needs: a directory, an agent process under the wanted user, and a view of
//! what is left on the host. Holds no cases.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;
use std::{env, thread};

use bafs_client::sandbox::{
    Access, JobPlan, JobSession, JobUser, SandboxOutcome, TemporaryDirectories, VolumeBind,
    job_environment,
};
use nix::unistd::geteuid;
use tempfile::TempDir;

use crate::agent::{AgentResult, AgentTask, JobAction, ROLE, clock};

/// An id that no user of the machine has.
pub(crate) const UNUSED_USER_ID: u32 = 12_345;

/// Under whom the agent runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentUser {
    Root,
    User,
}

impl AgentUser {
    /// What this machine lacks for a run under this user.
    pub(crate) fn missing_requirement(self) -> Option<String> {
        if self == Self::Root {
            return (!geteuid().is_root()).then(|| "the tests do not run as root".to_owned());
        }
        let tried = self
            .command(Path::new("unshare"))
            .args(["-Urm", "true"])
            .output();
        match tried {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Some(format!("setpriv or unshare: {error}")),
        }
    }

    pub(crate) fn uid(self) -> u32 {
        match self {
            Self::Root => 0,
            Self::User if geteuid().is_root() => UNUSED_USER_ID,
            Self::User => geteuid().as_raw(),
        }
    }

    fn command(self, program: &Path) -> Command {
        if self == Self::Root || !geteuid().is_root() {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        command
            .arg(format!("--reuid={UNUSED_USER_ID}"))
            .arg(format!("--regid={UNUSED_USER_ID}"))
            .arg("--clear-groups")
            .arg(program);
        command
    }
}

/// Says loudly that a test did not run, as the project's test runner expects it.
pub(crate) fn announce_skip(name: &str, reason: &str) {
    let line = format!("SKIPPED: sandbox::{name}: {}\n", reason.replace('\n', " "));
    eprint!("{line}");
    if let Some(log) = env::var_os("BAFS_SKIP_LOG") {
        let mut log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .unwrap();
        log.write_all(line.as_bytes()).unwrap();
    }
}

/// One job under one agent.
pub(crate) struct SandboxFixture {
    pub(crate) who: AgentUser,
    pub(crate) directory: TempDir,
    /// The agent's own working directory.
    pub(crate) agent_cwd: PathBuf,
    pub(crate) task: AgentTask,
}

impl SandboxFixture {
    /// A job that runs `script` in a shell, with no volume.
    pub(crate) fn new(user: AgentUser, script: &str) -> Self {
        let directory = tempfile::Builder::new()
            .prefix("bafs-sandbox-")
            .tempdir()
            .unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        chown(directory.path(), Some(user.uid()), Some(user.uid())).unwrap();
        // The name tells this job's processes from all others, in arguments and environment.
        let job = directory.path().display().to_string();
        let environment = job_environment(
            [
                ("PATH", "/usr/local/bin:/usr/bin:/bin"),
                ("BAFS_TOKEN", "secret"),
            ]
            .map(|(name, value)| (OsString::from(name), OsString::from(value))),
            &job,
            &[],
        );
        let plan = JobPlan {
            job,
            volumes: Vec::new(),
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into()],
            environment,
            working_directory: "/".into(),
            user: JobUser::SameUser,
            session: JobSession::NewSession,
            temporary: None,
        };
        let task = AgentTask {
            plan,
            mounts: 0,
            action: JobAction::Nothing,
            outputs: None,
            input: None,
        };
        Self {
            who: user,
            agent_cwd: directory.path().to_owned(),
            directory,
            task,
        }
    }

    /// Adds a stand-in volume at `path`.
    pub(crate) fn with_volume(mut self, path: impl Into<PathBuf>) -> Self {
        let source = format!("@{}", self.task.mounts);
        self.task.mounts += 1;
        self.add_volume(source, path, Access::ReadWrite);
        self
    }

    /// Gives the job directories of its own for temporary files.
    pub(crate) fn with_temporary(mut self) -> Self {
        self.task.plan.temporary = Some(TemporaryDirectories {
            directory: self.path("temporary"),
            memory_bytes: 1 << 20,
            shared_directories: BTreeSet::new(),
            named_paths: Vec::new(),
        });
        self
    }

    /// Adds the agent's directory as a volume at `/bafs-t`, for words between job and test.
    pub(crate) fn with_agent_directory(mut self) -> Self {
        let source = self.path("");
        self.add_volume(source, "/bafs-t", Access::ReadWrite);
        self
    }

    pub(crate) fn add_volume(
        &mut self,
        source: impl Into<PathBuf>,
        path: impl Into<PathBuf>,
        access: Access,
    ) {
        let name = format!("v{}", self.task.plan.volumes.len());
        let volume = VolumeBind {
            name,
            source: source.into(),
            path: path.into(),
            access,
        };
        self.task.plan.volumes.push(volume);
    }

    pub(crate) fn with_action(mut self, then: JobAction) -> Self {
        self.task.action = then;
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Starts the agent.
    pub(crate) fn spawn(&self) -> Child {
        self.agent().spawn().unwrap()
    }

    /// Starts the agent on a terminal of its own, and returns the keys of that terminal.
    pub(crate) fn spawn_in_terminal(&self) -> (Child, ChildStdin) {
        let agent = self.agent();
        let words = std::iter::once(agent.get_program()).chain(agent.get_args());
        let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
        // No word has a blank or a quote in it, as all are ours.
        let mut terminal = Command::new("script")
            .args(["-qefc", &format!("exec {}", words.join(" ")), "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(fs::File::create(self.path("agent.err")).unwrap())
            .spawn()
            .unwrap();
        let keys = terminal.stdin.take().unwrap();
        (terminal, keys)
    }

    fn agent(&self) -> Command {
        fs::write(self.path("task"), serde_json::to_vec(&self.task).unwrap()).unwrap();
        let mut command = self.who.command(&env::current_exe().unwrap());
        command
            .arg(ROLE)
            .arg(self.directory.path())
            .current_dir(&self.agent_cwd)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(self.path("agent.err")).unwrap());
        command
    }

    /// Runs the agent to its end and checks that nothing at all is left.
    #[track_caller]
    pub(crate) fn run(&self) -> AgentResult {
        let before = HostSnapshot::take();
        let mut agent = self.spawn();
        let status = agent.wait().unwrap();
        assert!(
            status.success(),
            "agent: {status} {}",
            self.read("agent.err")
        );
        self.assert_no_processes(Duration::ZERO);
        before.assert_unchanged();
        serde_json::from_str(&self.read("answer")).unwrap()
    }

    /// Runs the agent and expects the job to succeed; returns its output.
    #[track_caller]
    pub(crate) fn expect_output(&self) -> String {
        let answer = self.run();
        let shown = (self.read("out"), self.read("err"));
        assert_eq!(
            answer.report.outcome,
            SandboxOutcome::Exited(0),
            "{shown:?} {answer:?}"
        );
        shown.0
    }

    #[track_caller]
    pub(crate) fn wait_for_file(&self, name: &str) {
        let until = clock() + Duration::from_secs(20);
        while !self.path(name).exists() {
            assert!(
                clock() < until,
                "no {name}: {} {}",
                self.read("agent.err"),
                self.read("err")
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// All live processes that belong to this agent or job, however far they strayed.
    pub(crate) fn processes(&self) -> Vec<ListedProcess> {
        let marker = self.directory.path().as_os_str().as_bytes();
        let has = |text: &[u8]| text.windows(marker.len()).any(|window| window == marker);
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
                continue;
            };
            let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            if has(&arguments) || has(&environment) {
                let arguments = String::from_utf8_lossy(&arguments).replace('\0', " ");
                found.push(ListedProcess { pid, arguments });
            }
        }
        found
    }

    /// The process id of the one process whose arguments contain `text`.
    #[track_caller]
    pub(crate) fn process(&self, text: &str) -> i32 {
        let all = self.processes();
        let mut found = all
            .iter()
            .filter(|process| process.arguments.contains(text));
        found
            .next()
            .unwrap_or_else(|| panic!("no {text} in {all:?}"))
            .pid
    }

    #[track_caller]
    pub(crate) fn assert_no_processes(&self, within: Duration) {
        let until = clock() + within;
        loop {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            assert!(clock() < until, "left: {left:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[derive(Debug)]
pub(crate) struct ListedProcess {
    pub(crate) pid: i32,
    pub(crate) arguments: String,
}

/// What the host looks like from outside. Other tests run meanwhile, so only our kinds of mounts
/// count, and only directories that no test may touch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HostSnapshot {
    mounts: Vec<String>,
    entries: BTreeSet<PathBuf>,
}

impl HostSnapshot {
    pub(crate) fn take() -> Self {
        let list = |directory| fs::read_dir(directory).into_iter().flatten().flatten();
        let entries = [
            "/",
            "/boot",
            "/usr",
            "/usr/share",
            "/etc",
            "/mnt",
            "/srv",
            "/media",
        ]
        .into_iter()
        .flat_map(list)
        .map(|entry| entry.path())
        .collect();
        let table = fs::read("/proc/self/mounts").unwrap();
        let table = String::from_utf8_lossy(&table);
        let ours = |line: &&str| line.starts_with("bafs ") || line.starts_with("volume ");
        let mounts = table.lines().filter(ours).map(str::to_owned).collect();
        Self { mounts, entries }
    }

    #[track_caller]
    pub(crate) fn assert_unchanged(&self) {
        assert_eq!(*self, Self::take());
    }
}
