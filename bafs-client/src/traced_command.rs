//! Runs one command in a private name space, with directories of this machine as mirrors that
//! record its file use. Analyses nothing.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bafs_profile::trace::Trace;
use thiserror::Error;

use crate::fuse::MountError;
use crate::fuse::mirror::MirrorMount;
use crate::sandbox::{
    Access, JobPlan, JobSession, JobStreams, JobUser, NotStarted, OutputTarget, Sandbox,
    SandboxOutcome, StartError, VolumeBind,
};
use crate::trace_recorder::TraceRecorder;

/// How often processor time is looked at. A look reads `/proc` once, which takes under a
/// millisecond.
const CPU_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A directory whose files are traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedDirectory {
    /// The directory on this machine.
    pub source: PathBuf,
    /// Where the command sees it.
    pub path: PathBuf,
    /// What its paths in the trace begin with.
    pub shown: String,
    /// What the command may do there.
    pub access: Access,
}

/// Where an output stream of a command goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TracedOutput {
    /// To the same stream of this process.
    Inherit,
    /// To the standard error of this process.
    StandardError,
    /// Into a file, by its path as the command sees it.
    File(PathBuf),
}

/// A command whose file use is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedCommand {
    /// The program: a path, or a name looked up in `PATH`.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Its whole environment.
    pub environment: Vec<(OsString, OsString)>,
    /// Its working directory.
    pub directory: PathBuf,
    /// The directories that are traced. None lies in another.
    pub directories: Vec<TracedDirectory>,
    /// Where its standard output and error go.
    pub output: [TracedOutput; 2],
}

/// Why a command was not traced.
#[derive(Debug, Error)]
pub enum TraceError {
    /// A directory cannot be shown.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The command cannot be started here.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The program never ran.
    #[error(transparent)]
    NotStarted(#[from] NotStarted),
    /// The command was killed from outside.
    #[error("the command was killed: {0}")]
    Killed(String),
    /// There is no place for a mount.
    #[error("cannot make a mount point: {0}")]
    MountPoint(std::io::Error),
}

/// Runs a command and waits for its end. The trace lacks the names of the instance and the stage.
///
/// # Errors
/// [`TraceError`]: the command did not run to its own end.
pub fn run_traced(sandbox: &Sandbox, command: &TracedCommand) -> Result<Trace, TraceError> {
    let recorder = Arc::new(TraceRecorder::start());
    let mut mirrors = Vec::new();
    let mut volumes = Vec::new();
    for directory in &command.directories {
        let point = sandbox.mount_point().map_err(TraceError::MountPoint)?;
        let source = (directory.source.as_path(), directory.shown.as_str());
        mirrors.push(MirrorMount::mount(source, &point, &recorder)?);
        volumes.push(VolumeBind {
            name: directory.shown.clone(),
            source: point,
            path: directory.path.clone(),
            access: directory.access,
        });
    }
    let [stdout, stderr] = &command.output;
    let streams = JobStreams {
        stdout: open_output(stdout)?,
        stderr: open_output(stderr)?,
        ..JobStreams::interactive()
    };
    let running = sandbox.start(plan_job(command, volumes), streams)?;
    let is_over = Arc::new(AtomicBool::new(false));
    let sampler = thread::spawn({
        let (recorder, is_over) = (Arc::clone(&recorder), Arc::clone(&is_over));
        move || {
            while !is_over.load(Ordering::Relaxed) {
                recorder.record_cpu(measure_cpu_us(std::process::id()));
                thread::sleep(CPU_POLL_INTERVAL);
            }
        }
    });
    let report = running.wait();
    let ended_us = recorder.now_us();
    is_over.store(true, Ordering::Relaxed);
    let _ = sampler.join();
    // What the kernel still has comes before the unmount ends.
    drop(mirrors);
    let exit_code = match report.outcome {
        SandboxOutcome::Exited(code) => code,
        SandboxOutcome::Signaled(signal) => 128 + signal,
        SandboxOutcome::NotStarted(why) => return Err(why.into()),
        SandboxOutcome::Killed(why) | SandboxOutcome::Interrupted(why) => {
            return Err(TraceError::Killed(why));
        }
    };
    let usage = report.usage.unwrap_or_default();
    let cpu_us = usage.user_us + usage.system_us;
    let text = |word: &OsStr| word.to_string_lossy().into_owned();
    let wall_us = report.wall.as_micros() as u64;
    let mut trace = recorder.finish();
    // Before the program began, its name space was made.
    trace.delay_start(ended_us.saturating_sub(wall_us));
    trace.cpu_samples.retain(|(us, _)| *us < wall_us);
    trace.cpu_samples.push((wall_us, cpu_us));
    Ok(Trace {
        command: std::iter::once(&command.program)
            .chain(&command.arguments)
            .map(|word| text(word))
            .collect(),
        directory: text(command.directory.as_os_str()),
        roots: command
            .directories
            .iter()
            .map(|it| it.shown.clone())
            .collect(),
        wall_us,
        cpu_us,
        memory_bytes_max: usage.resident_bytes_max,
        exit_code,
        ..trace
    })
}

fn open_output(output: &TracedOutput) -> Result<OutputTarget, TraceError> {
    Ok(match output {
        TracedOutput::Inherit => OutputTarget::Inherit,
        TracedOutput::File(path) => OutputTarget::Path(path.clone()),
        TracedOutput::StandardError => {
            let copy = std::io::stderr().as_fd().try_clone_to_owned();
            OutputTarget::Descriptor(copy.map_err(StartError::Process)?)
        }
    })
}

fn plan_job(command: &TracedCommand, volumes: Vec<VolumeBind>) -> JobPlan {
    JobPlan {
        job: "profile".to_owned(),
        volumes,
        program: command.program.clone(),
        arguments: command.arguments.clone(),
        environment: command.environment.clone(),
        working_directory: command.directory.clone(),
        user: JobUser::SameUser,
        session: JobSession::SharedTerminal,
        temporary: None,
    }
}

/// Processor time of all descendants of a process, and of those that they waited for, in
/// microseconds.
fn measure_cpu_us(ancestor: u32) -> u64 {
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let mut processes: Vec<(u32, u32, u64)> = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some(found) = number.and_then(|number| read_process_times(&entry.path(), number)) {
            processes.push(found);
        }
    }
    let mut family = vec![ancestor];
    let mut sum = 0;
    let mut at = 0;
    while let Some(parent) = family.get(at).copied() {
        for (number, _, used) in processes.iter().filter(|(_, of, _)| *of == parent) {
            family.push(*number);
            sum += used;
        }
        at += 1;
    }
    sum * 1_000_000 / ticks
}

/// Number, parent and used ticks of a process: proc_pid_stat(5).
fn read_process_times(directory: &Path, number: u32) -> Option<(u32, u32, u64)> {
    let text = fs::read_to_string(directory.join("stat")).ok()?;
    // The name before it may hold anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let times = fields
        .skip(9)
        .take(4)
        .filter_map(|field| field.parse::<u64>().ok());
    Some((number, parent, times.sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_parent_is_found_in_proc() {
        let own = read_process_times(Path::new("/proc/self"), 7);
        assert_eq!(
            own.map(|it| it.1),
            Some(std::os::unix::process::parent_id())
        );
    }
}
