//! What every batch system must do for pilots, on its real daemons: cancel a queued and a running
//! pilot, end unknown ids quietly, and come back after its daemon was away.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_engine::{
    Engine, EngineCommands, GridEngine, LocalProcesses, PilotId, PilotSpec, PilotState, Slurm,
    SshHosts,
};
use bafs_tests::batch_systems::{
    GridEngineCluster, SlurmCluster, SlurmOptions, grid_engine_obstacle, slurm_obstacle, wait_until,
};
use bafs_tests::external_servers::start_sshd;
use bafs_tests::report_skip;
use tempfile::TempDir;

/// Seconds without a daemon; `BAFS_OUTAGE_S=60` is the whole test.
const OUTAGE_S_DEFAULT: u64 = 3;

/// Time for a batch system to do what it was asked for.
const TIMEOUT: Duration = Duration::from_secs(40);

/// The daemon of a batch system, if it has one.
trait QueueDaemon {
    fn stop(&mut self);
    fn start(&mut self) -> Result<()>;
}

impl QueueDaemon for SlurmCluster {
    fn stop(&mut self) {
        self.stop_controller();
    }

    fn start(&mut self) -> Result<()> {
        self.start_controller()
    }
}

impl QueueDaemon for GridEngineCluster {
    fn stop(&mut self) {
        self.stop_master();
    }

    fn start(&mut self) -> Result<()> {
        self.start_master()
    }
}

/// Pilots that write down their process numbers, and an engine for them.
struct EngineBench<'a> {
    engine: &'a dyn Engine,
    options: Vec<String>,
    directory: TempDir,
}

impl<'a> EngineBench<'a> {
    fn new(engine: &'a dyn Engine, options: &[&str]) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let bench = Self {
            engine,
            options: options.iter().map(|text| (*text).to_owned()).collect(),
            directory,
        };
        for name in ["first-0", "second-0", "third-0"] {
            let script = format!(
                "#!/bin/sh\necho $$ > '{0}.draft'\nmv '{0}.draft' '{0}'\nexec sleep 600\n",
                bench.pid_file(name).display()
            );
            fs::write(bench.path(name), script)?;
        }
        Ok(bench)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn pid_file(&self, name: &str) -> PathBuf {
        self.path(&format!("{name}.pid"))
    }

    fn pilot(&self, name: &str) -> PilotSpec {
        PilotSpec {
            name: name.to_owned(),
            script: self.path(name),
            log: self.path(&format!("{name}.log")),
            time_limit_s: Some(3_600),
            options: self.options.clone(),
        }
    }

    fn submit(&self, name: &str) -> Result<PilotId> {
        let pilot = self.pilot(name);
        self.engine.check(&pilot).context("dry run")?;
        Ok(self.engine.submit(&pilot)?)
    }

    fn state(&self, id: &PilotId) -> Result<PilotState> {
        let states = self.engine.poll(std::slice::from_ref(id))?;
        states.get(id).copied().context("each id gets a state")
    }

    fn wait_for(&self, id: &PilotId, wanted: fn(PilotState) -> bool) -> Result<()> {
        wait_until(TIMEOUT, || Ok(wanted(self.state(id)?))).with_context(|| {
            let state = self.state(id);
            format!("pilot {id} is {state:?}")
        })
    }

    /// Process number of a pilot that has begun.
    fn wait_for_pid(&self, name: &str) -> Result<u32> {
        let file = self.pid_file(name);
        wait_until(TIMEOUT, || Ok(file.exists())).with_context(|| {
            let log = fs::read_to_string(self.pilot(name).log).unwrap_or_default();
            format!("pilot {name} begins: {log}")
        })?;
        Ok(fs::read_to_string(file)?.trim().parse()?)
    }
}

fn is_running(state: PilotState) -> bool {
    matches!(state, PilotState::Running { .. })
}

fn is_ended(state: PilotState) -> bool {
    state == PilotState::Ended
}

fn is_process_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

fn outage() -> Duration {
    let given = std::env::var("BAFS_OUTAGE_S")
        .ok()
        .and_then(|text| text.parse().ok());
    Duration::from_secs(given.unwrap_or(OUTAGE_S_DEFAULT))
}

/// A batch system that runs one pilot at a time.
fn check_queue_engine(
    engine: &dyn Engine,
    options: &[&str],
    daemon: &mut dyn QueueDaemon,
) -> Result<()> {
    let bench = EngineBench::new(engine, options)?;
    let first = bench.submit("first-0")?;
    let first_pid = bench.wait_for_pid("first-0")?;
    bench.wait_for(&first, is_running)?;

    let second = bench.submit("second-0")?;
    ensure!(
        bench.state(&second)? == PilotState::Waiting,
        "the second waits"
    );
    engine.cancel(&second).context("cancel a queued pilot")?;
    bench.wait_for(&second, is_ended)?;
    ensure!(
        !bench.pid_file("second-0").exists(),
        "a cancelled pilot began"
    );

    let third = bench.submit("third-0")?;
    engine.cancel_named("third-0").context("cancel by name")?;
    bench.wait_for(&third, is_ended)?;

    daemon.stop();
    ensure!(
        engine.poll(std::slice::from_ref(&first)).is_err(),
        "nothing is known"
    );
    ensure!(engine.cancel(&first).is_err(), "nothing is cancelled");
    std::thread::sleep(outage());
    ensure!(
        is_process_alive(first_pid),
        "a running pilot outlives the outage"
    );
    daemon.start()?;
    bench.wait_for(&first, is_running)?;

    check_running_and_unknown(&bench, &first, first_pid)
}

fn check_running_and_unknown(bench: &EngineBench<'_>, id: &PilotId, pid: u32) -> Result<()> {
    bench.engine.cancel(id).context("cancel a running pilot")?;
    bench.wait_for(id, is_ended)?;
    wait_until(TIMEOUT, || Ok(!is_process_alive(pid))).context("the process ends")?;
    bench.engine.cancel(id).context("cancel an ended pilot")?;
    bench
        .engine
        .cancel_named("no-such-pilot-0")
        .context("cancel an unknown name")?;
    let unknown = PilotId("999999".to_owned());
    bench
        .engine
        .cancel(&unknown)
        .context("cancel an unknown id")?;
    ensure!(
        bench.state(&unknown)? == PilotState::Ended,
        "an unknown id has ended"
    );
    let both = bench.engine.poll(&[unknown.clone(), id.clone()])?;
    let ended = [
        (unknown, PilotState::Ended),
        (id.clone(), PilotState::Ended),
    ];
    ensure!(both == BTreeMap::from(ended), "{both:?}");
    Ok(())
}

/// Plain processes, which never wait.
fn check_process_engine(engine: &dyn Engine) -> Result<()> {
    let bench = EngineBench::new(engine, &[])?;
    let first = bench.submit("first-0")?;
    let pid = bench.wait_for_pid("first-0")?;
    bench.wait_for(&first, is_running)?;
    check_running_and_unknown(&bench, &first, pid)
}

fn commands(environment: Vec<(String, String)>) -> EngineCommands {
    EngineCommands {
        environment,
        timeout: Duration::from_secs(20),
    }
}

#[test]
fn cluster_slurm_engine_conforms() -> Result<()> {
    if let Some(reason) = slurm_obstacle() {
        report_skip("cluster_slurm_engine_conforms", &reason);
        return Ok(());
    }
    let options = SlurmOptions {
        nodes: 1,
        ..SlurmOptions::default()
    };
    let mut cluster = SlurmCluster::start(&options)?;
    let (name, value) = cluster.environment();
    let engine = Slurm::new(commands(vec![(
        name.to_owned(),
        value.display().to_string(),
    )]));
    let files = cluster.directory().to_owned();
    check_queue_engine(&engine, &["--exclusive"], &mut cluster)?;
    let bench = EngineBench::new(&engine, &["--partition=absent"])?;
    let refused = engine.check(&bench.pilot("first-0"));
    let said = refused.expect_err("there is no such partition").to_string();
    assert!(said.contains("artition"), "{said}");
    drop(cluster);
    assert_nothing_left(&files);
    Ok(())
}

/// No daemon, job or step of a private batch system survives it.
fn assert_nothing_left(files: &Path) {
    assert!(!files.exists(), "{} is left", files.display());
    let left = bafs_tests::processes_matching(&files.display().to_string());
    assert!(left.is_empty(), "{left:?}");
    let groups = fs::read_dir("/sys/fs/cgroup/freezer")
        .into_iter()
        .flatten()
        .flatten();
    let own = format!("slurm_p{}n", std::process::id());
    let left: Vec<_> = groups
        .filter(|it| it.file_name().to_string_lossy().starts_with(&own))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn cluster_grid_engine_conforms() -> Result<()> {
    if let Some(reason) = grid_engine_obstacle() {
        report_skip("cluster_grid_engine_conforms", &reason);
        return Ok(());
    }
    let mut cluster = GridEngineCluster::start(1)?;
    let environment = cluster.environment().into_iter();
    let environment = environment.map(|(name, value)| (name.to_owned(), value));
    let engine = GridEngine::new(commands(environment.collect()));
    check_queue_engine(&engine, &[], &mut cluster)
}

#[test]
fn local_process_engine_conforms() -> Result<()> {
    check_process_engine(&LocalProcesses::new(commands(Vec::new())))
}

#[test]
fn cluster_ssh_engine_conforms() -> Result<()> {
    let own = tempfile::tempdir()?;
    let (_server, port, _) = start_sshd(own.path())?;
    let file = |name: &str| own.path().join(name).display().to_string();
    let options = vec![
        format!("-p{port}"),
        format!("-i{}", file("key")),
        format!("-oUserKnownHostsFile={}", file("known")),
    ];
    let engine = SshHosts::new(commands(Vec::new()), vec!["127.0.0.1".to_owned()]);
    check_process_engine(&engine.with_options(options))
}
