//! Chaos from outside. Each server and each user's scheduler has a network name space of its own;
//! two users run workflows at once; servers, links and disks fail as a seed says. Afterwards every
//! result is compared with one that was made without BAFS, and each job that ran again needs a
//! fault of what held it or its volumes.

mod injector;
mod journal;
pub mod plan;
pub mod workload;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use self::injector::FaultInjector;
pub use self::journal::{Execution, InjectedFault, Rerun, RunHistory, executions};
use self::workload::{DATA, Expected, Workload};
use crate::bench::measure::{Watch, time_of_day};
use crate::bench::nohang::fault;
use crate::dice::SeededRng;
use crate::netns::{NamespaceCluster, ChildGuard};
use crate::{processes_matching, bafs_program};

/// Two runs at once.
const USERS: [&str; 2] = ["alice", "bob"];

const NODES: [&str; 5] = ["1GB"; 5];
/// The disk of each node has a little more than it offers.
const DISK: &str = "1100m";
const SLOTS: u32 = 2;

/// Things fail within so long of a run.
const WINDOW: Duration = Duration::from_secs(22);
/// Runs take so much longer at least, that what was away is back before they end.
const CALM: Duration = Duration::from_secs(6);

/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(170);

/// So much of what a scheduler said is told.
const SAID_LINES: usize = 12;

/// What came of a seed.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Which seed it really was.
    pub seed: u64,
    /// What failed, in order.
    pub faults: Vec<String>,
    /// Files at home that are not what they must be.
    pub wrong: Vec<String>,
    /// Runs that did not end complete, files that are missing, and what is left of the runs.
    pub failed: Vec<String>,
    /// Jobs that ran again.
    pub reruns: Vec<Rerun>,
    /// Executions in all.
    pub executions: usize,
    /// How long it took.
    pub seconds: f64,
    /// Where journals and logs are kept, if something is not right.
    pub kept: Option<PathBuf>,
}

impl Verdict {
    /// Jobs that ran again though nothing failed that held them.
    pub fn without_cause(&self) -> impl Iterator<Item = &Rerun> {
        self.reruns.iter().filter(|rerun| rerun.cause.is_none())
    }

    /// Whether everything is as it must be.
    pub fn is_fine(&self) -> bool {
        self.wrong.is_empty() && self.failed.is_empty() && self.without_cause().next().is_none()
    }
}

/// Why it cannot run here, if so.
pub fn cannot() -> Option<String> {
    crate::mount_obstacle().or_else(crate::netns::namespace_obstacle)
}

/// Two users' runs with the faults of a seed.
///
/// # Errors
/// No cluster, or a fault that cannot be made.
pub fn run(seed: u64) -> Result<Verdict> {
    // As [`Dice`] has it.
    let asked = std::env::var("SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let seed = asked.unwrap_or(seed);
    apart(move || {
        let mut dice = SeededRng::new(seed);
        let slots = SLOTS * NODES.len() as u32 / 2;
        let workloads = USERS.map(|user| Workload::new(user, &mut dice, WINDOW + CALM, slots));
        let window_ms = u64::try_from(WINDOW.as_millis())?;
        let faults = plan::plan(&mut dice, NODES.len() as u64, &USERS, window_ms);
        let run = ChaosRun::start(&workloads, Disks::Small)?;
        run.play(seed, faults)
    })
}

/// All these seeds, two beside each other, as most of a run's time is waiting; each verdict is told
/// as soon as it is there. What cannot be run counts as failed.
pub fn run_all(
    seeds: impl IntoIterator<Item = u64>,
    tell: &(dyn Fn(&Verdict) + Sync),
) -> Vec<Verdict> {
    const AT_ONCE: usize = 2;
    let seeds: Vec<u64> = seeds.into_iter().collect();
    let work = &|at: usize| {
        let own = seeds.iter().skip(at).step_by(AT_ONCE);
        let verdicts = own.map(|&seed| {
            let verdict = run(seed).unwrap_or_else(|error| Verdict {
                seed,
                failed: vec![format!("{error:#}")],
                ..Verdict::default()
            });
            tell(&verdict);
            verdict
        });
        verdicts.collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE)
            .map(|at| scope.spawn(move || work(at)))
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined.flat_map(Result::unwrap_or_default).collect()
    })
}

/// A run of 73 jobs whose scheduler is cut off from everybody for so long, nine seconds after its
/// start; nothing else fails.
///
/// # Errors
/// As [`run`].
pub fn cut_off(seconds: u64) -> Result<Verdict> {
    apart(move || {
        const PIPELINES: usize = 24;
        const AFTER_MS: u64 = 9_000;
        let slots = SLOTS * NODES.len() as u32;
        let least = Duration::from_secs(16);
        let workload = Workload::plain(USERS[0], PIPELINES, least, slots);
        let fault = plan::Fault {
            kind: plan::FaultKind::Cut,
            target: USERS[0].to_owned(),
            other: None,
            at_ms: AFTER_MS,
            until_ms: AFTER_MS + seconds * 1_000,
            strength: 0,
        };
        let run = ChaosRun::start(std::slice::from_ref(&workload), Disks::Large)?;
        run.play(0, vec![fault])
    })
}

/// Does something on a thread whose mounts nobody else sees; they end with it.
fn apart<T: Send + 'static>(act: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let acting = std::thread::spawn(move || {
        fault::live_apart()?;
        act()
    });
    acting.join().map_err(|_| anyhow!("the run panicked"))?
}

/// Whether nodes have disks that others can fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disks {
    Small,
    Large,
}

/// A user with a run.
struct UserRun {
    user: String,
    workflow: PathBuf,
    expected: Vec<Expected>,
    run: ChildGuard,
}

struct ChaosRun {
    runs: Vec<UserRun>,
    cluster: NamespaceCluster,
    disks: Disks,
}

impl ChaosRun {
    fn start(workloads: &[Workload], disks: Disks) -> Result<Self> {
        let mut cluster = NamespaceCluster::start(&NODES, SLOTS)?;
        if disks == Disks::Small {
            for node in nodes() {
                cluster.kill(&node)?;
                injector::wipe(&cluster.store_path(&node))?;
                fault::make_small(&cluster.store_path(&node), DISK)?;
                cluster.restart(&node)?;
            }
            cluster.wait_for_servers(NODES.len() + 1)?;
        }
        cluster.write_home(DATA, &Workload::data())?;
        let data = cluster.home.path().join(DATA);
        let data = data.parent().context("data is in a directory")?;
        let mut runs = Vec::new();
        for workload in workloads {
            let user = workload.user().to_owned();
            let plain = tempfile::tempdir()?;
            let expected = workload.make_expected(data, plain.path())?;
            let workflow = cluster.directory.path().join(format!("{user}.bafs"));
            std::fs::write(&workflow, workload.text())?;
            cluster.network.add_host(&user)?;
            let run = start_run(&cluster, &user, &workflow)?;
            runs.push(UserRun {
                user,
                workflow,
                expected,
                run,
            });
        }
        Ok(Self {
            runs,
            cluster,
            disks,
        })
    }

    /// Lets the faults happen, waits for the runs, and judges.
    fn play(mut self, seed: u64, faults: Vec<plan::Fault>) -> Result<Verdict> {
        let watch = Watch::start();
        let begun_ms = time_of_day().0;
        let mut verdict = Verdict {
            seed,
            faults: faults.iter().map(ToString::to_string).collect(),
            ..Verdict::default()
        };
        let injected: Vec<InjectedFault> = faults.iter().map(|it| injected(it, begun_ms)).collect();
        let mut injector = FaultInjector::new(faults);
        let mut ended: Vec<Option<bool>> = vec![None; self.runs.len()];
        while !injector.is_over() || ended.contains(&None) {
            std::thread::sleep(Duration::from_millis(40));
            let now_ms = u64::try_from(watch.elapsed().as_millis()).unwrap_or(u64::MAX);
            injector.go_on(now_ms, &mut self)?;
            for (user_run, ended) in self.runs.iter_mut().zip(&mut ended) {
                if ended.is_none() && !injector.is_killed(&user_run.user) {
                    *ended = user_run.run.try_wait()?.map(|status| status.success());
                }
            }
            if watch.elapsed() > LIMIT {
                break;
            }
        }
        verdict.seconds = watch.elapsed().as_secs_f64();
        for (user_run, ended) in self.runs.iter_mut().zip(ended) {
            let how = match ended {
                Some(true) => continue,
                Some(false) => "failed",
                None => "hangs",
            };
            let said = std::fs::read_to_string(log_path(&self.cluster, &user_run.user))?;
            let lines: Vec<&str> = said.lines().collect();
            let last = lines[lines.len().saturating_sub(SAID_LINES)..].join("\n");
            verdict
                .failed
                .push(format!("the run of {} {how}:\n{last}", user_run.user));
            user_run.run.kill()?;
            user_run.run.wait()?;
        }
        self.judge(&injected, &mut verdict)?;
        self.end(&mut verdict)?;
        Ok(verdict)
    }

    fn judge(&self, injected: &[InjectedFault], verdict: &mut Verdict) -> Result<()> {
        for user_run in &self.runs {
            for file in &user_run.expected {
                match self.cluster.read_home(&file.path) {
                    Ok(found) if found == file.content => {}
                    Ok(found) => verdict.wrong.push(format!(
                        "{} has {} bytes instead of {}, or others",
                        file.path,
                        found.len(),
                        file.content.len()
                    )),
                    Err(_) => verdict.failed.push(format!("{} is missing", file.path)),
                }
            }
            let past = RunHistory::read(&journal_of(&user_run.workflow))?;
            verdict.executions += past.started_count();
            verdict.reruns.extend(past.reruns(&user_run.user, injected));
        }
        verdict.failed.extend(self.leftovers()?);
        Ok(())
    }

    /// Volumes and agents that are left when servers have had time to notice.
    fn leftovers(&self) -> Result<Vec<String>> {
        let agent = format!("agent --identity {}", self.cluster.identity_directory().display());
        let mut left = Vec::new();
        for _ in 0..60 {
            let volumes = self.cluster.run_json(&["volume", "list"])?;
            let volumes = volumes.as_array().into_iter().flatten();
            let told = volumes.map(|it| format!("left: volume {} on {}", it["name"], it["node"]));
            let agents = processes_matching(&agent).into_iter();
            left = told.chain(agents.map(|it| format!("left: {it}"))).collect();
            if left.is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(left)
    }

    /// Ends all, and looks whether a process is left.
    fn end(self, verdict: &mut Verdict) -> Result<()> {
        let Self {
            runs,
            cluster,
            disks,
        } = self;
        drop(runs);
        if !verdict.is_fine() {
            let kept = evidence_directory(verdict.seed);
            save_evidence(cluster.directory.path(), &kept)?;
            verdict.kept = Some(kept);
        }
        let directory = cluster.directory.path().to_owned();
        let stores: Vec<PathBuf> = nodes().map(|node| cluster.store_path(&node)).collect();
        drop(cluster);
        if disks == Disks::Small {
            for store in stores {
                fault::take_small(&store)?;
            }
            std::fs::remove_dir_all(&directory).ok();
        }
        let left = processes_matching(&directory.to_string_lossy());
        verdict
            .failed
            .extend(left.into_iter().map(|it| format!("left: {it}")));
        Ok(())
    }
}

fn nodes() -> impl Iterator<Item = String> {
    (1..=NODES.len()).map(|at| format!("n{at}"))
}

fn log_path(cluster: &NamespaceCluster, user: &str) -> PathBuf {
    cluster.directory.path().join(format!("{user}.said"))
}

fn journal_of(workflow: &Path) -> PathBuf {
    let mut name = workflow.as_os_str().to_owned();
    name.push(".journal");
    PathBuf::from(name)
}

/// Starts a user's run, or takes up what a killed scheduler left.
fn start_run(cluster: &NamespaceCluster, user: &str, workflow: &Path) -> Result<ChildGuard> {
    let workflow = workflow.to_string_lossy();
    let mut command = cluster.bafs_command(&["run", &workflow, "--user", user])?;
    let mut options = OpenOptions::new();
    let said = options
        .create(true)
        .append(true)
        .open(log_path(cluster, user))?;
    command.stdout(said.try_clone()?).stderr(said);
    cluster.network.spawn_in_host(user, &mut command)
}

/// What a fault may be a cause for. One of a scheduler, of its link or of the catalog is none:
/// nothing that holds a job or a volume suffers.
fn injected(fault: &plan::Fault, begun_ms: u64) -> InjectedFault {
    let is_server = |name: &&String| *name != "catalog" && !USERS.contains(&name.as_str());
    let sides = std::iter::once(&fault.target).chain(&fault.other);
    let user = fault.other.iter().find(|it| USERS.contains(&it.as_str()));
    let is_told_in_vain = fault.other.as_deref() == Some("catalog");
    let servers: BTreeSet<String> = match is_told_in_vain {
        // Only the catalog misses it.
        true => BTreeSet::new(),
        false => sides.filter(is_server).cloned().collect(),
    };
    InjectedFault {
        text: fault.to_string(),
        at_ms: begun_ms + fault.at_ms,
        until_ms: begun_ms + fault.until_ms,
        servers,
        user: user.cloned(),
    }
}

/// Where the journals and logs of a seed that is not fine are kept.
fn evidence_directory(seed: u64) -> PathBuf {
    let program = bafs_program();
    bafs_program.with_file_name("chaos").join(format!("seed-{seed}"))
}

fn save_evidence(directory: &Path, kept: &Path) -> Result<()> {
    std::fs::create_dir_all(kept)?;
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_owned();
        if path.is_file() {
            std::fs::copy(&path, kept.join(name))?;
        }
    }
    Ok(())
}
