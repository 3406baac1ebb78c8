//! The two processes between agent and job. The outer one only makes the name spaces and
//! waits; the inner one is their init: it builds the root, starts the job, and its death is
//! the job's death. Neither decides how an end is judged.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions, create_dir_all};
use std::io::{self, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio, exit};
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, getppid, setsid};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::agent_watch::AgentWatch;
use super::completed_environment::complete_environment;
use super::control::{self, JobOrder, StageReport, StreamSpec};
use super::executable::{SHELL, explain_refusal, find_executable, is_same_file, is_script};
use super::forked_process::{ReservedStage, StageProcess, StageTasks, fork_child};
use super::image_root::enter_image_root;
use super::job_init::{JobInit, is_init};
use super::outcome::{JobUsage, NotStarted, NotStartedReason};
use super::plan::{Access, JobPlan, JobSession, VolumeBind};
use super::root::{RootNotes, refusal};
use super::{job_user, mount_point_holder, probe, process_ids, root};
use crate::own_process::{
    HOLDER, INNER, MOUNT_WATCHDOG, OUTER, OWN_EXECUTABLE, PROBE, PROBE_MOUNT, SUBCOMMAND,
};
use crate::{doctor, kernel, mount_watchdog};

const NULL: &str = "/dev/null";

/// Turns this process into a stage of a job if its arguments say so, and then never returns.
///
/// Every program that starts jobs calls this first thing in `main`, before any thread.
pub fn dispatch_job_init() {
    let mut arguments = env::args_os().skip(1);
    if arguments.next().as_deref() == Some(OsStr::new(SUBCOMMAND)) {
        job_init_main(arguments);
    }
}

/// Runs a stage of a job; `arguments` are those after `job-init`.
pub fn job_init_main(arguments: impl IntoIterator<Item = OsString>) -> ! {
    let mut arguments = arguments.into_iter();
    let stage = arguments.next().unwrap_or_default();
    let job = arguments.next().unwrap_or_default();
    let ended = match stage.to_str() {
        Some(OUTER) => {
            let silence_ms = arguments
                .next()
                .and_then(|text| text.to_str()?.parse().ok());
            run_outer_stage(
                silence_ms.map(Duration::from_millis),
                InnerStart::Program(job),
            )
        }
        Some(INNER) => run_inner_stage(),
        Some(PROBE) => probe::print_verdict(),
        Some(HOLDER) => mount_point_holder::holder_main(),
        Some(MOUNT_WATCHDOG) => {
            mount_watchdog::watchdog_main(std::iter::once(job).chain(arguments))
        }
        Some(PROBE_MOUNT) => doctor::mounts::probe_mount(Path::new(&job)),
        _ => Err(io::Error::other("job-init is for the agent's own use")),
    };
    exit(i32::from(ended.is_err()));
}

/// Makes the process that becomes the outer stage of this one's first job. Call it with one thread,
/// after [`super::enter_private`]; the calling thread must live as long as this process.
///
/// # Errors
/// The system gives no process or descriptor.
pub fn reserve_stage() -> io::Result<ReservedStage> {
    ReservedStage::start(StageTasks {
        hold_mount_points: mount_point_holder::holder_main,
        run_outer_stage: |silence| run_outer_stage(silence, InnerStart::Fork),
    })
}

/// How the outer stage starts the inner one.
#[derive(Debug)]
enum InnerStart {
    /// The program anew, of a job with this name.
    Program(OsString),
    /// As a copy of itself.
    Fork,
}

/// Makes the name spaces, starts their init, and stays only as its parent.
fn run_outer_stage(silence: Option<Duration>, inner: InnerStart) -> io::Result<()> {
    let agent = getppid();
    // A signal to the whole process group is for agent and job to judge.
    SigSet::all().thread_block()?;
    let socket = stage_socket()?;
    let watched = silence.map(|silence| AgentWatch::begin(agent, silence));
    let watched = watched.transpose()?;
    let flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWIPC;
    let made = unshare(flags).map_err(|errno| refusal("unshare mounts, processes, IPC", errno));
    let started = made.and_then(|()| {
        start_inner_stage(&socket, inner)
            .map_err(|error| refusal(format_args!("start init ({error})"), errno_of(&error)))
    });
    match started {
        Ok(mut child) => {
            // Fits, as the kernel's process ids have 22 bits.
            control::send_message(&socket, &StageReport::Init(child.id() as i32))?;
            if let Some(watched) = watched {
                watched.watch_until_end(child.id());
            }
            child.wait();
            Ok(())
        }
        Err(refusal) => control::send_message(&socket, &StageReport::NotStarted(refusal)),
    }
}

fn start_inner_stage(socket: &UnixStream, inner: InnerStart) -> io::Result<StageProcess> {
    match inner {
        InnerStart::Program(job) => {
            let spawned = Command::new(OWN_EXECUTABLE)
                .arg0("bafs")
                .args([OsStr::new(SUBCOMMAND), OsStr::new(INNER), &job])
                .env_clear()
                .stdout(Stdio::null())
                .spawn()?;
            Ok(StageProcess::Spawned(spawned))
        }
        InnerStart::Fork => {
            let input = socket.as_fd().try_clone_to_owned()?;
            fork_child(INNER, input, None, run_inner_stage).map(StageProcess::Forked)
        }
    }
}

/// Is process 1 of the job's name space, from the empty root to the last process.
fn run_inner_stage() -> io::Result<()> {
    if !is_init() {
        return Err(io::Error::other("this stage runs as process 1 only"));
    }
    let socket = stage_socket()?;
    let descriptors = control::receive_descriptors(&socket)?;
    let mut requests = BufReader::new(socket.try_clone()?);
    let order = control::receive_order(&mut requests)?;
    let (job, notes) = match start_job(&order, descriptors) {
        Ok(started) => started,
        Err(refusal) => return control::send_message(&socket, &StageReport::NotStarted(refusal)),
    };
    drop(order);
    let RootNotes { missing, warnings } = notes;
    control::send_message(&socket, &StageReport::Started { missing, warnings })?;
    JobInit::begin(job, requests)?.accompany(|end| {
        // The agent judges it.
        control::send_message(&socket, &StageReport::Ended(end))
    })?;
    control::send_message(&socket, &StageReport::Usage(measure_usage()?))
}

/// What both stages do first; returns the socket, which arrives as standard input.
fn stage_socket() -> io::Result<UnixStream> {
    // The parent is one thread that lives as long as the job, so its death is the agent's or
    // the outer stage's. The socket says the same, but not to a process that is stopped.
    set_pdeathsig(Signal::SIGKILL)?;
    kernel::close_on_exec_from(3)?;
    io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map(UnixStream::from)
}

fn start_job(order: &JobOrder, passed: Vec<OwnedFd>) -> Result<(Pid, RootNotes), NotStarted> {
    let plan = &order.plan;
    let proc = Path::new("/proc");
    // On the host's list; the job's own knows this process as 1.
    let own = process_ids::own_id(proc);
    let own = own.map_err(|error| refusal("read /proc/self", errno_of(&error)))?;
    let are_apart = process_ids::set_first_id(own, proc);
    // Directories of the new root get the modes we say, and the job gets the agent's mask.
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let base = Path::new(&order.mount_base);
    let mut notes = match plan.root() {
        Some(image) => {
            let ids = job_user::ids_of(&plan.user, order.privilege);
            enter_image_root(plan, image, ids)?
        }
        None => root::enter_root(&plan.volumes, base, plan.temporary.as_ref())?,
    };
    // A container may show its /proc/sys read-only, where the job's own can be written.
    if let Err(error) = are_apart.or_else(|_| process_ids::set_first_id(own, proc)) {
        notes.warnings.push(format!(
            "process ids start at 2, as in other jobs of this machine: cannot write \
             /proc/sys/kernel/ns_last_pid ({error}); use a kernel with CONFIG_CHECKPOINT_RESTORE \
             and, in a container, a writable /proc/sys"
        ));
    }
    rustix::process::umask(mask);
    set_descriptor_limit(order.descriptor_limit)?;
    job_user::switch_user(&plan.user, order.privilege)?;
    // A change of user clears the death signal.
    set_pdeathsig(Signal::SIGKILL).map_err(|errno| refusal("protect init", errno))?;
    if plan.session == JobSession::NewSession {
        setsid().map_err(|errno| refusal("start a session", errno))?;
    }
    env::set_current_dir(&plan.working_directory)
        .map_err(|error| working_directory_error(plan, &error))?;
    make_directories(&order.streams[1..], &order.plan.volumes)?;
    let streams = open_streams(&order.streams, passed)?;
    // Blocked signals would be inherited; init itself gets none that it does not handle.
    SigSet::empty()
        .thread_set_mask()
        .map_err(|errno| refusal("unblock signals", errno))?;
    spawn_job(plan, streams).map(|job| (job, notes))
}

/// Why the working directory cannot be entered; a volume may be mounted over it.
fn working_directory_error(plan: &JobPlan, error: &io::Error) -> NotStarted {
    let directory = &plan.working_directory;
    let is_above = |volume: &&VolumeBind| {
        // A symbolic link may lead to the mount point.
        let real = std::fs::canonicalize(&volume.path);
        [Some(volume.path.clone()), real.ok()]
            .into_iter()
            .flatten()
            .any(|point| directory.starts_with(point))
    };
    let hidden_by = plan.volumes.iter().find(is_above);
    let message = match hidden_by {
        Some(volume) if error.kind() == io::ErrorKind::NotFound => format!(
            "the volume {} at {} hides the working directory {}; start in another directory, mount \
             the volume at another path, or create the directory in the volume",
            volume.name,
            volume.path.display(),
            directory.display()
        ),
        _ => format!(
            "cannot enter working directory {}: {error}",
            directory.display()
        ),
    };
    NotStarted {
        reason: NotStartedReason::DirectoryUnusable,
        errno: error.raw_os_error(),
        message,
    }
}

/// Gives the job the number of open files that the agent was started with.
fn set_descriptor_limit(current: Option<u64>) -> Result<(), NotStarted> {
    let limit = Rlimit {
        current,
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    setrlimit(Resource::Nofile, limit)
        .map_err(|errno| refusal("limit open files", Errno::from_raw(errno.raw_os_error())))
}

fn spawn_job(plan: &JobPlan, [stdin, stdout, stderr]: [OwnedFd; 3]) -> Result<Pid, NotStarted> {
    let environment = complete_environment(plan);
    // The last one counts, as when a program looks for it.
    let path = environment.iter().rev().find(|(name, _)| name == "PATH");
    let program = find_executable(&plan.program, path.map(|(_, value)| value.as_os_str()))?;
    let spawn = |mut command: Command| {
        command
            .args(&plan.arguments)
            .env_clear()
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .env("PWD", &plan.working_directory)
            .stdin(stdin.try_clone()?)
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?);
        if plan.session == JobSession::NewSession {
            command.process_group(0);
        }
        command.spawn()
    };
    let mut direct = Command::new(&program);
    direct.arg0(&plan.program);
    let child = match spawn(direct) {
        Err(error)
            if error.raw_os_error() == Some(Errno::ENOEXEC as i32) && is_script(&program) =>
        {
            let mut by_shell = Command::new(SHELL);
            by_shell.arg(&program);
            spawn(by_shell)
        }
        spawned => spawned,
    };
    let child = child.map_err(|error| explain_refusal(&program, &error))?;
    // Dropping the child leaves the process alone; `reap_until` collects it with the others.
    Ok(Pid::from_raw(child.id() as i32))
}

/// Makes the directories of output files in volumes: in one that is new nobody could have made
/// them. Those of the host are left as they are.
fn make_directories(outputs: &[StreamSpec], volumes: &[VolumeBind]) -> Result<(), NotStarted> {
    let is_inside = |path: &Path| {
        let mut volumes = volumes.iter().filter(|it| it.access == Access::ReadWrite);
        volumes.any(|volume| path.starts_with(&volume.path))
    };
    for output in outputs {
        if let StreamSpec::Path(path) = output
            && let Some(directory) = Path::new(path).parent().filter(|path| is_inside(path))
        {
            create_dir_all(directory).map_err(|error| unusable_stream(path, &error))?;
        }
    }
    Ok(())
}

fn open_streams(
    streams: &[StreamSpec; 3],
    passed: Vec<OwnedFd>,
) -> Result<[OwnedFd; 3], NotStarted> {
    let mut passed = passed.into_iter();
    let null = || {
        open_stream_file(OpenOptions::new().read(true).write(true), &NULL.into()).map(OwnedFd::from)
    };
    let mut next = || passed.next().map_or_else(null, Ok);
    let [input, output, error] = streams;
    let stdin = match input {
        StreamSpec::Null => null()?,
        StreamSpec::Passed => next()?,
        StreamSpec::Path(path) => open_stream_file(OpenOptions::new().read(true), path)?.into(),
    };
    let create = |path| {
        open_stream_file(
            OpenOptions::new().write(true).create(true).truncate(true),
            path,
        )
    };
    let mut shared = None;
    let stdout = match output {
        StreamSpec::Null => null()?,
        StreamSpec::Passed => next()?,
        StreamSpec::Path(path) => {
            let file = create(path)?;
            shared = Some((
                path,
                file.try_clone()
                    .map_err(|error| unusable_stream(path, &error))?,
            ));
            file.into()
        }
    };
    let stderr = match (error, shared) {
        (StreamSpec::Null, _) => null()?,
        (StreamSpec::Passed, _) => next()?,
        (StreamSpec::Path(path), Some((first, file)))
            if is_same_file(Path::new(path), Path::new(first)) =>
        {
            file.into()
        }
        (StreamSpec::Path(path), _) => create(path)?.into(),
    };
    Ok([stdin, stdout, stderr])
}

fn open_stream_file(options: &OpenOptions, path: &OsString) -> Result<File, NotStarted> {
    options
        .open(path)
        .map_err(|error| unusable_stream(path, &error))
}

fn unusable_stream(path: &OsStr, error: &io::Error) -> NotStarted {
    NotStarted {
        reason: NotStartedReason::StreamUnusable,
        errno: error.raw_os_error(),
        message: format!("cannot open {} for the job: {error}", path.display()),
    }
}

fn measure_usage() -> io::Result<JobUsage> {
    let used = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let micros = |time: nix::sys::time::TimeVal| {
        (time.tv_sec() as u64)
            .saturating_mul(1_000_000)
            .saturating_add(time.tv_usec() as u64)
    };
    Ok(JobUsage {
        // The kernel counts in KiB.
        resident_bytes_max: (used.max_rss() as u64).saturating_mul(1_024),
        user_us: micros(used.user_time()),
        system_us: micros(used.system_time()),
    })
}

fn errno_of(error: &io::Error) -> Errno {
    super::privilege::errno_of(error)
}
