//! Chaos from outside. Each server and each user's scheduler has a network name space of its own;
//! two users run workflows at once; servers, links and disks fail according to a seed. Afterwards
//! every result is compared with one that was made without BAFS. Each job that ran again needs a
//! fault of its node or its volumes as cause.

mod fault_injector;
pub mod fault_plan;
mod run_history;
pub mod workload;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use self::fault_injector::FaultInjector;
pub use self::run_history::{Execution, InjectedFault, Rerun, RunHistory, read_executions};
use self::workload::{ExpectedFile, SHARED_DATA_PATH, Workload};
use crate::bench::measure::{Stopwatch, time_of_day};
use crate::bench::nohang::fault_scenario;
use crate::netns::{ChildGuard, NamespaceCluster};
use crate::seeded_rng::SeededRng;
use crate::{bafs_program, processes_matching};

/// Two runs at once.
const USERS: [&str; 2] = ["alice", "bob"];

const NODES: [&str; 5] = ["1GB"; 5];
/// The disk of each node has a little more than it offers.
const DISK_SIZE: &str = "1100m";
const SLOTS: u32 = 2;

/// Things fail within so long of a run.
const FAULT_WINDOW: Duration = Duration::from_secs(22);
/// Runs outlast the faults by this time, so that absent servers return before their ends.
const QUIET_PERIOD: Duration = Duration::from_secs(6);

/// A run that takes longer hangs.
const RUN_TIMEOUT: Duration = Duration::from_secs(170);

/// Most bytes of a scheduler's output in the report.
const OUTPUT_TAIL_LINES: usize = 12;

/// The result of a seed.
#[derive(Debug, Default)]
pub struct SeedResult {
    /// Which seed it really was.
    pub seed: u64,
    /// The injected faults, in order.
    pub faults: Vec<String>,
    /// Files at home with wrong content.
    pub wrong_files: Vec<String>,
    /// Incomplete runs, missing files, and leftovers of the runs.
    pub problems: Vec<String>,
    /// Jobs that ran again.
    pub reruns: Vec<Rerun>,
    /// Executions in all.
    pub executions: usize,
    /// How long it took.
    pub seconds: f64,
    /// Where journals and logs are kept, if something is not right.
    pub evidence_path: Option<PathBuf>,
}

impl SeedResult {
    /// Jobs that ran again though nothing failed that held them.
    pub fn reruns_without_cause(&self) -> impl Iterator<Item = &Rerun> {
        self.reruns.iter().filter(|rerun| rerun.cause.is_none())
    }

    /// Whether everything is as it must be.
    pub fn has_passed(&self) -> bool {
        self.wrong_files.is_empty()
            && self.problems.is_empty()
            && self.reruns_without_cause().next().is_none()
    }
}

/// Why it cannot run here, if so.
pub fn injection_obstacle() -> Option<String> {
    crate::mount_obstacle().or_else(crate::netns::namespace_obstacle)
}

/// Two users' runs with the faults of a seed.
///
/// # Errors
/// No cluster, or a fault that cannot be made.
pub fn run_seed(seed: u64) -> Result<SeedResult> {
    // As [`SeededRng`] has it.
    let asked = std::env::var("SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let seed = asked.unwrap_or(seed);
    run_with_private_mounts(move || {
        let mut rng = SeededRng::new(seed);
        let slots = SLOTS * NODES.len() as u32 / 2;
        let workloads =
            USERS.map(|user| Workload::new(user, &mut rng, FAULT_WINDOW + QUIET_PERIOD, slots));
        let window_ms = u64::try_from(FAULT_WINDOW.as_millis())?;
        let faults = fault_plan::plan_faults(&mut rng, NODES.len() as u64, &USERS, window_ms);
        let run = ChaosRun::start(&workloads, DiskSize::Small)?;
        run.run_with_faults(seed, faults)
    })
}

/// All these seeds, two concurrently, because most of a run's time is waiting; each verdict is
/// printed immediately. A seed that cannot run counts as failed.
pub fn run_seeds(
    seeds: impl IntoIterator<Item = u64>,
    tell: &(dyn Fn(&SeedResult) + Sync),
) -> Vec<SeedResult> {
    const AT_ONCE: usize = 2;
    let seeds: Vec<u64> = seeds.into_iter().collect();
    let work = &|at: usize| {
        let own = seeds.iter().skip(at).step_by(AT_ONCE);
        let verdicts = own.map(|&seed| {
            let verdict = run_seed(seed).unwrap_or_else(|error| SeedResult {
                seed,
                problems: vec![format!("{error:#}")],
                ..SeedResult::default()
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
/// As `run`.
pub fn run_with_scheduler_cut_off(seconds: u64) -> Result<SeedResult> {
    run_with_private_mounts(move || {
        const PIPELINES: usize = 24;
        const AFTER_MS: u64 = 9_000;
        let slots = SLOTS * NODES.len() as u32;
        let least = Duration::from_secs(16);
        let workload = Workload::with_declared_sizes(USERS[0], PIPELINES, least, slots);
        let fault = fault_plan::PlannedFault {
            kind: fault_plan::FaultKind::Cut,
            target: USERS[0].to_owned(),
            other_side: None,
            at_ms: AFTER_MS,
            until_ms: AFTER_MS + seconds * 1_000,
            strength: 0,
        };
        let run = ChaosRun::start(std::slice::from_ref(&workload), DiskSize::Large)?;
        run.run_with_faults(0, vec![fault])
    })
}

/// Runs a function on a thread with private mounts, which end with it.
fn run_with_private_mounts<T: Send + 'static>(
    act: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let acting = std::thread::spawn(move || {
        fault_scenario::enter_private_namespaces()?;
        act()
    });
    acting.join().map_err(|_| anyhow!("the run panicked"))?
}

/// Whether nodes have disks that others can fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DiskSize {
    Small,
    Large,
}

/// A user with a run.
struct UserRun {
    user: String,
    workflow: PathBuf,
    expected: Vec<ExpectedFile>,
    run: ChildGuard,
}

struct ChaosRun {
    runs: Vec<UserRun>,
    cluster: NamespaceCluster,
    disks: DiskSize,
}

impl ChaosRun {
    fn start(workloads: &[Workload], disks: DiskSize) -> Result<Self> {
        let mut cluster = NamespaceCluster::start(&NODES, SLOTS)?;
        if disks == DiskSize::Small {
            for node in node_names() {
                cluster.kill(&node)?;
                fault_injector::wipe_store(&cluster.store_path(&node))?;
                fault_scenario::mount_small_disk(&cluster.store_path(&node), DISK_SIZE)?;
                cluster.restart(&node)?;
            }
            cluster.wait_for_servers(NODES.len() + 1)?;
        }
        cluster.write_home(SHARED_DATA_PATH, &Workload::shared_data())?;
        let data = cluster.home.path().join(SHARED_DATA_PATH);
        let data = data.parent().context("data is in a directory")?;
        let mut runs = Vec::new();
        for workload in workloads {
            let user = workload.user().to_owned();
            let plain = tempfile::tempdir()?;
            let expected = workload.compute_expected(data, plain.path())?;
            let workflow = cluster.directory.path().join(format!("{user}.bafs"));
            std::fs::write(&workflow, workload.workflow_text())?;
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
    fn run_with_faults(
        mut self,
        seed: u64,
        faults: Vec<fault_plan::PlannedFault>,
    ) -> Result<SeedResult> {
        let watch = Stopwatch::start();
        let begun_ms = time_of_day().0;
        let mut verdict = SeedResult {
            seed,
            faults: faults.iter().map(ToString::to_string).collect(),
            ..SeedResult::default()
        };
        let injected: Vec<InjectedFault> = faults
            .iter()
            .map(|it| to_injected_fault(it, begun_ms))
            .collect();
        let mut injector = FaultInjector::new(faults);
        let mut ended: Vec<Option<bool>> = vec![None; self.runs.len()];
        while !injector.is_finished() || ended.contains(&None) {
            std::thread::sleep(Duration::from_millis(40));
            let now_ms = u64::try_from(watch.elapsed().as_millis()).unwrap_or(u64::MAX);
            injector.advance(now_ms, &mut self)?;
            for (user_run, ended) in self.runs.iter_mut().zip(&mut ended) {
                if ended.is_none() && !injector.is_scheduler_killed(&user_run.user) {
                    *ended = user_run.run.try_wait()?.map(|status| status.success());
                }
            }
            if watch.elapsed() > RUN_TIMEOUT {
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
            let last = lines[lines.len().saturating_sub(OUTPUT_TAIL_LINES)..].join("\n");
            verdict
                .problems
                .push(format!("the run of {} {how}:\n{last}", user_run.user));
            user_run.run.kill()?;
            user_run.run.wait()?;
        }
        self.check_results(&injected, &mut verdict)?;
        self.stop_cluster(&mut verdict)?;
        Ok(verdict)
    }

    fn check_results(&self, injected: &[InjectedFault], verdict: &mut SeedResult) -> Result<()> {
        for user_run in &self.runs {
            for file in &user_run.expected {
                match self.cluster.read_home(&file.path) {
                    Ok(found) if found == file.content => {}
                    Ok(found) => verdict.wrong_files.push(format!(
                        "{} has {} bytes instead of {}, or others",
                        file.path,
                        found.len(),
                        file.content.len()
                    )),
                    Err(_) => verdict.problems.push(format!("{} is missing", file.path)),
                }
            }
            let past = RunHistory::read(&journal_path(&user_run.workflow))?;
            verdict.executions += past.count_started();
            verdict
                .reruns
                .extend(past.find_reruns(&user_run.user, injected));
        }
        verdict.problems.extend(self.find_leftovers()?);
        Ok(())
    }

    /// Volumes and agents that are left when servers have had time to notice.
    fn find_leftovers(&self) -> Result<Vec<String>> {
        let agent = format!(
            "agent --identity {}",
            self.cluster.identity_directory().display()
        );
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
    fn stop_cluster(self, verdict: &mut SeedResult) -> Result<()> {
        let Self {
            runs,
            cluster,
            disks,
        } = self;
        drop(runs);
        if !verdict.has_passed() {
            let kept = evidence_directory(verdict.seed);
            save_evidence(cluster.directory.path(), &kept)?;
            verdict.evidence_path = Some(kept);
        }
        let directory = cluster.directory.path().to_owned();
        let stores: Vec<PathBuf> = node_names().map(|node| cluster.store_path(&node)).collect();
        drop(cluster);
        if disks == DiskSize::Small {
            for store in stores {
                fault_scenario::unmount_small_disk(&store)?;
            }
            std::fs::remove_dir_all(&directory).ok();
        }
        let left = processes_matching(&directory.to_string_lossy());
        verdict
            .problems
            .extend(left.into_iter().map(|it| format!("left: {it}")));
        Ok(())
    }
}

fn node_names() -> impl Iterator<Item = String> {
    (1..=NODES.len()).map(|at| format!("n{at}"))
}

fn log_path(cluster: &NamespaceCluster, user: &str) -> PathBuf {
    cluster.directory.path().join(format!("{user}.said"))
}

fn journal_path(workflow: &Path) -> PathBuf {
    let mut name = workflow.as_os_str().to_owned();
    name.push(".journal");
    PathBuf::from(name)
}

/// Starts a user's run, or resumes the run of a killed scheduler.
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

/// The executions that a fault may affect. One of a scheduler, of its link or of the catalog is
/// none: nothing that holds a job or a volume suffers.
fn to_injected_fault(fault: &fault_plan::PlannedFault, begun_ms: u64) -> InjectedFault {
    let is_server = |name: &&String| *name != "catalog" && !USERS.contains(&name.as_str());
    let sides = std::iter::once(&fault.target).chain(&fault.other_side);
    let user = fault
        .other_side
        .iter()
        .find(|it| USERS.contains(&it.as_str()));
    let is_told_in_vain = fault.other_side.as_deref() == Some("catalog");
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
    program.with_file_name("chaos").join(format!("seed-{seed}"))
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
