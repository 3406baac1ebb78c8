//! A private Grid Engine: qmaster and one execution daemon with several slots.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::unistd::{User, geteuid, gethostname};
use tempfile::TempDir;

use super::{DAEMON_TIMEOUT, Daemon, find_missing, kill_by_environment, run, wait_until};
use crate::external_servers::find_free_port;

const PROGRAMS: &str = "/usr/lib/gridengine";
const DEFAULTS: &str = "/usr/share/gridengine";

/// Both daemons are on this host; its other name is an alias of it.
const HOST: &str = "localhost";

/// A running Grid Engine. Dropping it ends every job and daemon, and removes every file.
#[derive(Debug)]
pub struct GridEngineCluster {
    master: Option<Daemon>,
    execution: Option<Daemon>,
    ports: (u16, u16),
    directory: TempDir,
}

/// Why Grid Engine cannot be started here, if it cannot.
pub fn grid_engine_obstacle() -> Option<String> {
    if !geteuid().is_root() {
        return Some("only root starts the daemons of Grid Engine".to_owned());
    }
    find_missing(&[
        "/usr/lib/gridengine/sge_qmaster",
        "/usr/lib/gridengine/sge_execd",
        "/usr/lib/gridengine/qsub",
    ])
}

impl GridEngineCluster {
    /// Starts the daemons with a queue of so many slots, and waits until it takes jobs.
    ///
    /// # Errors
    /// A daemon that does not start, with what it said.
    pub fn start(slots: usize) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("sge-").tempdir()?;
        let mut cluster = Self {
            master: None,
            execution: None,
            ports: (find_free_port()?, find_free_port()?),
            directory,
        };
        cluster.prepare_files()?;
        cluster.start_master()?;
        // Both are there already where the name of this host is theirs.
        let _ = run(cluster.command("qconf").args(["-ah", HOST]));
        run(cluster.command("qconf").args(["-as", HOST]))?;
        let place = cluster.directory.path().to_owned();
        let mut command = cluster.daemon_command("sge_execd");
        cluster.execution = Some(Daemon::start("sge_execd", &mut command, &place)?);
        let mut hosts = cluster.command("qconf");
        hosts.arg("-sel");
        wait_until(DAEMON_TIMEOUT, || {
            Ok(run(&mut hosts).is_ok_and(|names| names.contains(HOST)))
        })
        .context("sge_execd registers")?;
        cluster.add_queue(slots)?;
        Ok(cluster)
    }

    /// The variables that lead commands to this Grid Engine.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let root = self.directory.path().join("root").display().to_string();
        vec![
            ("SGE_ROOT", root),
            ("SGE_CELL", "default".to_owned()),
            ("SGE_QMASTER_PORT", self.ports.0.to_string()),
            ("SGE_EXECD_PORT", self.ports.1.to_string()),
        ]
    }

    /// A command of Grid Engine, for this cluster.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(Path::new(PROGRAMS).join(program));
        command.envs(self.environment());
        command
    }

    /// Ends the master; jobs go on.
    pub fn stop_master(&mut self) {
        if let Some(mut master) = self.master.take() {
            master.stop();
        }
    }

    /// Starts the master and waits until it answers.
    ///
    /// # Errors
    /// As it says.
    pub fn start_master(&mut self) -> Result<()> {
        let mut command = self.daemon_command("sge_qmaster");
        let daemon = Daemon::start("sge_qmaster", &mut command, self.directory.path())?;
        self.master = Some(daemon);
        let mut ask = self.command("qconf");
        ask.arg("-sconf");
        wait_until(DAEMON_TIMEOUT, || {
            self.master.as_mut().map_or(Ok(()), Daemon::check_running)?;
            Ok(run(&mut ask).is_ok())
        })
        .context("sge_qmaster answers")
    }

    fn daemon_command(&self, program: &str) -> Command {
        let mut command = self.command(program);
        // Not in the background.
        command.env("SGE_ND", "1");
        command
    }

    fn prepare_files(&self) -> Result<()> {
        let place = self.directory.path();
        for name in [
            "root/default/common",
            "qmaster/job_scripts",
            "spool",
            "execd",
        ] {
            fs::create_dir_all(place.join(name))?;
        }
        for name in ["bin", "lib", "utilbin", "util"] {
            let target = Path::new("/var/lib/gridengine").join(name);
            symlink(target, place.join("root").join(name))?;
        }
        let user = User::from_uid(geteuid())?
            .context("the user has a name")?
            .name;
        let (dir, host) = (place.display(), gethostname()?);
        let common = place.join("root/default/common");
        fs::write(common.join("act_qmaster"), format!("{HOST}\n"))?;
        let alias = format!("{HOST} {}\n", host.to_string_lossy());
        fs::write(common.join("host_aliases"), alias)?;
        let bootstrap = format!(
            "Version: 6.2\nadmin_user {user}\ndefault_domain none\nignore_fqdn false\n\
             spooling_method berkeleydb\nspooling_lib libspoolb\nspooling_params {dir}/spool\n\
             binary_path /usr/sbin\nqmaster_spool_dir {dir}/qmaster\nsecurity_mode none\n\
             listener_threads 2\nworker_threads 2\nscheduler_threads 1\n"
        );
        fs::write(common.join("bootstrap"), bootstrap)?;
        let usual = fs::read_to_string(Path::new(DEFAULTS).join("default-configuration"))?;
        let execd = place.join("execd").display().to_string();
        let settings = [
            ("execd_spool_dir", execd.as_str()),
            ("min_uid", "0"),
            ("min_gid", "0"),
            ("load_report_time", "00:00:02"),
            ("mailer", "/bin/true"),
        ];
        fs::write(place.join("conf"), replace_values(&usual, &settings))?;
        let spool = place.join("spool");
        let mut init = self.command("spoolinit");
        run(init
            .args(["berkeleydb", "libspoolb"])
            .arg(&spool)
            .arg("init"))?;
        let resources = Path::new(DEFAULTS).join("util/resources");
        self.fill_spool("configuration", place.join("conf"))?;
        self.fill_spool("complexes", resources.join("centry"))?;
        self.fill_spool("usersets", resources.join("usersets"))?;
        self.fill_spool("managers", PathBuf::from(user))
    }

    fn fill_spool(&self, what: &str, from: PathBuf) -> Result<()> {
        run(self.command("spooldefaults").arg(what).arg(from)).map(drop)
    }

    fn add_queue(&self, slots: usize) -> Result<()> {
        let place = self.directory.path();
        let template = run(self.command("qconf").arg("-sq"))?;
        let count = slots.to_string();
        let settings = [
            ("qname", "main.q"),
            ("hostlist", HOST),
            ("slots", count.as_str()),
            // A busy test machine takes jobs all the same.
            ("load_thresholds", "NONE"),
            ("pe_list", "NONE"),
            ("notify", "00:00:05"),
        ];
        let file = place.join("queue");
        fs::write(&file, replace_values(&template, &settings))?;
        run(self.command("qconf").arg("-Aq").arg(&file))?;
        let scheduler = run(self.command("qconf").arg("-ssconf"))?;
        let soon = [
            ("schedule_interval", "0:0:1"),
            ("flush_submit_sec", "1"),
            ("flush_finish_sec", "1"),
        ];
        fs::write(&file, replace_values(&scheduler, &soon))?;
        run(self.command("qconf").arg("-Msconf").arg(&file)).map(drop)
    }
}

impl Drop for GridEngineCluster {
    fn drop(&mut self) {
        if self.master.is_some() || self.start_master().is_ok() {
            let _ = run(self.command("qdel").args(["-u", "*"]));
            let mut list = self.command("qstat");
            list.args(["-u", "*"]);
            let _ = wait_until(Duration::from_secs(10), || {
                Ok(run(&mut list)?.trim().is_empty())
            });
        }
        if let Some(mut execution) = self.execution.take() {
            execution.stop();
        }
        self.stop_master();
        let root = self.directory.path().join("root");
        kill_by_environment(&format!("SGE_ROOT={}", root.display()));
    }
}

/// A table of names and values with other values for some names.
fn replace_values(table: &str, settings: &[(&str, &str)]) -> String {
    let replace = |line: &str| {
        let name = line.split_whitespace().next().unwrap_or_default();
        match settings.iter().find(|(wanted, _)| *wanted == name) {
            Some((_, value)) => format!("{name} {value}\n"),
            None => format!("{line}\n"),
        }
    };
    table.lines().map(replace).collect()
}
