//! A private Slurm: munge, slurmctld, and several slurmd on one machine.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User, geteuid, gethostname};
use tempfile::TempDir;

use super::{DAEMON_TIMEOUT, Daemon, find_missing, kill_by_environment, run, wait_until};
use crate::external_servers::find_free_port;

const MUNGED: &str = "/usr/sbin/munged";
const SLURMCTLD: &str = "/usr/sbin/slurmctld";
const SLURMD: &str = "/usr/sbin/slurmd";
const PLUGINS: &str = "/usr/lib/x86_64-linux-gnu/slurm-wlm";

/// Control groups of version 1, where slurmd tracks processes without systemd.
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// Runs a command with a device for FUSE that everybody may open, in its own name space of mounts.
const SHARED_FUSE: &str = "f=$1/fuse.$$; shift; mknod $f c 10 229 && chmod 666 $f && \
                           mount --bind $f /dev/fuse && exec \"$@\"";

/// Time for the jobs of a cluster to end at its end.
const JOBS_TIMEOUT: Duration = Duration::from_secs(15);

/// How slurmd finds the processes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessTracking {
    /// By control groups, as sites do: nothing escapes.
    ControlGroup,
    /// By the tree of processes, where the kernel has no usable control groups.
    ProcessTree,
}

/// What the cluster shall be.
#[derive(Debug, Clone, Default)]
pub struct SlurmOptions {
    /// Compute nodes, each a slurmd with two processors.
    pub nodes: usize,
    /// Script of the plugin `burst_buffer/lua`, and further lines of `burst_buffer.conf`.
    pub burst_buffer: Option<(PathBuf, String)>,
    /// Further lines of `slurm.conf`.
    pub more_settings: String,
    /// Variables for the daemons.
    pub environment: Vec<(&'static str, String)>,
    /// Other users may mount on the nodes; root only may say so.
    pub has_shared_fuse: bool,
}

/// A running Slurm. Dropping it ends every job and daemon, and removes every file.
#[derive(Debug)]
pub struct SlurmCluster {
    controller: Option<Daemon>,
    nodes: Vec<Daemon>,
    munged: Daemon,
    tracking: ProcessTracking,
    environment: Vec<(&'static str, String)>,
    has_shared_fuse: bool,
    directory: TempDir,
}

/// Why Slurm cannot be started here, if it cannot.
pub fn slurm_obstacle() -> Option<String> {
    find_missing(&[MUNGED, SLURMCTLD, SLURMD, "/usr/bin/sbatch"])
}

/// Whether this Slurm has the plugin for burst buffers in Lua.
pub fn has_burst_buffer_plugin() -> bool {
    Path::new(PLUGINS).join("burst_buffer_lua.so").exists()
}

impl SlurmCluster {
    /// Starts the daemons and waits until every node is idle.
    ///
    /// # Errors
    /// A daemon that does not start, with what it said.
    pub fn start(options: &SlurmOptions) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("slurm-").tempdir()?;
        let place = directory.path();
        // Jobs and commands of other users would read the configuration, too.
        fs::set_permissions(place, Permissions::from_mode(0o755))?;
        for name in ["state", "spool", "munge"] {
            fs::create_dir(place.join(name))?;
        }
        let tracking = choose_tracking();
        let munged = start_munged(place)?;
        write_configuration(place, options, tracking)?;
        let mut cluster = Self {
            controller: None,
            nodes: Vec::new(),
            munged,
            tracking,
            environment: options.environment.clone(),
            has_shared_fuse: options.has_shared_fuse,
            directory,
        };
        cluster.start_controller()?;
        for index in 1..=options.nodes {
            cluster.start_node(index)?;
        }
        let all_idle = |cluster: &mut Self| {
            for daemon in cluster.nodes.iter_mut().chain(&mut cluster.controller) {
                daemon.check_running()?;
            }
            let states = run(cluster.command("sinfo").args(["-h", "-N", "-o", "%t"]))?;
            let idle = states.lines().filter(|state| *state == "idle").count();
            Ok(idle == options.nodes)
        };
        wait_until(DAEMON_TIMEOUT, || all_idle(&mut cluster)).context("nodes of Slurm")?;
        Ok(cluster)
    }

    /// How slurmd tracks processes here.
    pub fn tracking(&self) -> ProcessTracking {
        self.tracking
    }

    /// The directory of the daemons.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The variable that leads commands to this Slurm.
    pub fn environment(&self) -> (&'static str, PathBuf) {
        ("SLURM_CONF", self.directory.path().join("slurm.conf"))
    }

    /// A command of Slurm, for this cluster.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let (name, value) = self.environment();
        command.env(name, value);
        command
    }

    /// Ends the controller; jobs go on.
    pub fn stop_controller(&mut self) {
        if let Some(mut controller) = self.controller.take() {
            controller.stop();
        }
    }

    /// Starts the controller and waits until it answers.
    ///
    /// # Errors
    /// As it says.
    pub fn start_controller(&mut self) -> Result<()> {
        let place = self.directory.path();
        let mut command = self.command(SLURMCTLD);
        command.envs(self.environment.iter().cloned());
        command.arg("-f").arg(place.join("slurm.conf")).arg("-D");
        let controller = Daemon::start("slurmctld", &mut command, place)?;
        self.controller = Some(controller);
        let mut ping = self.command("scontrol");
        ping.arg("ping");
        wait_until(DAEMON_TIMEOUT, || {
            self.controller
                .as_mut()
                .map_or(Ok(()), Daemon::check_running)?;
            Ok(run(&mut ping).is_ok())
        })
        .context("slurmctld answers")
    }

    /// Kills a node's slurmd and every process of its jobs, as a power cut would. The index counts
    /// from 1.
    pub fn kill_node(&mut self, index: usize) {
        if let Some(daemon) = self.nodes.get_mut(index - 1) {
            let _ = daemon.child.kill();
            let _ = daemon.child.wait();
        }
        kill_control_group(&node_name(index));
        kill_by_environment(&format!("SLURMD_NODENAME={}\0", node_name(index)));
    }

    fn start_node(&mut self, index: usize) -> Result<()> {
        let place = self.directory.path();
        let name = node_name(index);
        let mut command = if self.has_shared_fuse {
            // The device of the machine stays as it is.
            let mut command = self.command("unshare");
            command
                .args(["--mount", "sh", "-c", SHARED_FUSE, "sh"])
                .arg(place)
                .arg(SLURMD);
            command
        } else {
            self.command(SLURMD)
        };
        command.envs(self.environment.iter().cloned());
        command.arg("-f").arg(place.join("slurm.conf"));
        command.args(["-D", "-N", &name]);
        let daemon = Daemon::start(&format!("slurmd-{index}"), &mut command, place)?;
        self.nodes.push(daemon);
        Ok(())
    }

    fn end_jobs(&mut self) {
        if self.controller.is_none() && self.start_controller().is_err() {
            return;
        }
        let user = geteuid().as_raw().to_string();
        let _ = run(self.command("scancel").args(["--user", &user]));
        let mut list = self.command("squeue");
        list.arg("-h");
        let _ = wait_until(JOBS_TIMEOUT, || Ok(run(&mut list)?.trim().is_empty()));
    }
}

impl Drop for SlurmCluster {
    fn drop(&mut self) {
        self.end_jobs();
        for daemon in &self.nodes {
            daemon.send_signal(Signal::SIGTERM);
        }
        for daemon in &mut self.nodes {
            daemon.stop();
        }
        self.stop_controller();
        self.munged.stop();
        let (name, value) = self.environment();
        kill_by_environment(&format!("{name}={}", value.display()));
        for index in 1..=self.nodes.len() {
            kill_control_group(&node_name(index));
            remove_control_group(&Path::new(FREEZER).join(format!("slurm_{}", node_name(index))));
        }
    }
}

/// A name that no Slurm of the machine and of no other test has: control groups are named after it.
fn node_name(index: usize) -> String {
    format!("p{}n{index}", std::process::id())
}

fn choose_tracking() -> ProcessTracking {
    let probe = Path::new(FREEZER).join(format!("bafs-probe-{}", std::process::id()));
    if geteuid().is_root() && fs::create_dir(&probe).is_ok() {
        let _ = fs::remove_dir(probe);
        return ProcessTracking::ControlGroup;
    }
    eprintln!(
        "NOTICE: proctrack/linuxproc instead of proctrack/cgroup: {FREEZER} cannot be written"
    );
    ProcessTracking::ProcessTree
}

fn start_munged(place: &Path) -> Result<Daemon> {
    let key = place.join("munge/key");
    let mut bytes = [0; 128];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    fs::write(&key, bytes)?;
    fs::set_permissions(&key, Permissions::from_mode(0o400))?;
    let option = |name: &str, file: &str| format!("--{name}={}/munge/{file}", place.display());
    let mut command = Command::new(MUNGED);
    command.args(["--foreground", "--force", "--num-threads=2"]);
    command.args([option("key-file", "key"), option("socket", "socket")]);
    command.args([option("pid-file", "pid"), option("log-file", "log")]);
    command.arg(option("seed-file", "seed"));
    let mut daemon = Daemon::start("munged", &mut command, place)?;
    wait_until(DAEMON_TIMEOUT, || {
        daemon.check_running()?;
        Ok(place.join("munge/socket").exists())
    })
    .context("munged listens")?;
    Ok(daemon)
}

fn write_configuration(
    place: &Path,
    options: &SlurmOptions,
    tracking: ProcessTracking,
) -> Result<()> {
    let user = User::from_uid(geteuid())?
        .context("the user has a name")?
        .name;
    let host = gethostname()?.to_string_lossy().into_owned();
    let (port, dir) = (find_free_port()?, place.display());
    let track = match tracking {
        ProcessTracking::ControlGroup => "cgroup",
        ProcessTracking::ProcessTree => "linuxproc",
    };
    let mut text = format!(
        "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={port}\n\
         AuthType=auth/munge\nAuthInfo=socket={dir}/munge/socket\nCredType=cred/munge\n\
         SlurmUser={user}\nSlurmdUser={user}\nStateSaveLocation={dir}/state\n\
         SlurmdSpoolDir={dir}/spool/%n\nSlurmctldPidFile={dir}/slurmctld.pid\n\
         SlurmdPidFile={dir}/slurmd.%n.pid\nSlurmctldLogFile={dir}/slurmctld.log\n\
         SlurmdLogFile={dir}/slurmd.%n.log\nProctrackType=proctrack/{track}\n\
         TaskPlugin=task/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n\
         SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1\n\
         ReturnToService=2\nKillWait=5\nMpiDefault=none\nSwitchType=switch/none\n\
         JobAcctGatherType=jobacct_gather/none\nMinJobAge=5\nInactiveLimit=0\n\
         SlurmdTimeout=10\nMessageTimeout=5\n"
    );
    for index in 1..=options.nodes {
        let _ = writeln!(
            text,
            "NodeName={} NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs=2 RealMemory=1000",
            node_name(index),
            find_free_port()?
        );
    }
    let all: Vec<String> = (1..=options.nodes).map(node_name).collect();
    let _ = writeln!(
        text,
        "PartitionName=main Nodes={} Default=YES MaxTime=INFINITE State=UP\n{}",
        all.join(","),
        options.more_settings
    );
    if let Some((script, more)) = &options.burst_buffer {
        text += "BurstBufferType=burst_buffer/lua\n";
        fs::copy(script, place.join("burst_buffer.lua"))?;
        fs::write(place.join("burst_buffer.conf"), more)?;
    }
    fs::write(place.join("slurm.conf"), text)?;
    let groups = "CgroupAutomount=no\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\n";
    fs::write(place.join("cgroup.conf"), groups)?;
    Ok(())
}

/// Kills every process in the control groups of a node.
fn kill_control_group(node: &str) {
    let mut open = vec![Path::new(FREEZER).join(format!("slurm_{node}"))];
    while let Some(group) = open.pop() {
        let listed = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        for pid in listed.lines().filter_map(|line| line.parse().ok()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        open.extend(child_directories(&group));
    }
}

/// Removes a control group with all below it.
fn remove_control_group(group: &Path) {
    for child in child_directories(group) {
        remove_control_group(&child);
    }
    let _ = wait_until(Duration::from_secs(2), || {
        Ok(!group.exists() || fs::remove_dir(group).is_ok())
    });
}

fn child_directories(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}
