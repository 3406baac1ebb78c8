//! `bafs mount`, `bafs exec` and `bafs agent`: agents for a person and for a node. They run before
//! any thread exists, because a process that has threads may not enter a user name space.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use bafs_client::agent::{AgentOptions, Explain, TemporaryLocation};
use bafs_client::entry_points::{EXIT_ENVIRONMENT, EnvironmentFailure, FailureFormat, exec_main};
use bafs_client::sandbox::{self, DirectoryRemover, JobPlan, JobSession, VolumeBind};
use bafs_client::tree::Durability;
use bafs_proto::ErrorCode;
use bafs_proto::message::{Advert, JobCommand, JobLimits, JobSpec, MountSpec, MountTarget, Role};
use bafs_proto::path::ROOT_PATH;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{VolumeKind, VolumeStatus};
use bafs_server::executor::machine_memory_bytes;

use crate::args::{AgentArgs, ClientArgs, DelegateArgs, ExecArgs, MountArgs, UsageError};
use crate::client::{ClusterClient, load_user_identity};
use crate::failure::{FailureClass, class_of};
use crate::init;
use crate::locked_directory::{LockedDirectory, TemporaryDirectoryError, remove_stale_directories};
use crate::output::Printer;
use crate::terminal_text;
use crate::units::parse_bytes;

const SECOND_MS: u64 = 1000;

/// Why a program of `bafs exec` was not begun.
#[derive(Debug)]
struct ExecStartError {
    /// The volume that is the cause, if one is.
    volume: Option<String>,
    error: anyhow::Error,
}

impl From<anyhow::Error> for ExecStartError {
    fn from(error: anyhow::Error) -> Self {
        Self {
            volume: None,
            error,
        }
    }
}

/// Runs `bafs exec`.
pub(crate) fn run_exec(args: &ExecArgs, output: Printer) -> Result<ExitCode> {
    let format = failure_format(output);
    let wanted = args
        .mounts
        .iter()
        .map(|text| parse_mount(text))
        .collect::<Result<Vec<_>>>()?;
    check_mount_paths(&wanted)?;
    match start_exec(args, wanted, format) {
        Ok(code) => Ok(code),
        Err(ExecStartError { error, .. }) if UsageError::is_cause_of(&error) => Err(error),
        // 1 would be the program's own.
        Err(not_begun) => Ok(report_start_error(&not_begun, format)),
    }
}

fn start_exec(
    args: &ExecArgs,
    wanted: Vec<MountRequest>,
    format: FailureFormat,
) -> Result<ExitCode, ExecStartError> {
    let directory = LockedDirectory::create_only("exec", false)?;
    // Also where this process is killed. Until then it looks for what others left, which takes
    // long where there are many temporary files.
    let remover = DirectoryRemover::start(directory.path(), remove_stale_directories);
    let remover = remover.context("cannot start a process")?;
    let place = TemporaryLocation {
        directory: directory.path().to_owned(),
        memory_bytes: machine_memory_bytes() / 2,
    };
    let identity = load_user_identity(&args.client.identity)?;
    let choices = agent_choices(args.explain, args.delegate, Durability::OnSync);
    let user = identity.clone();
    let prepare = async move |pool| {
        // One connection to a node is for the search and for the volumes.
        let client = ClusterClient::with_pool(user, pool, &args.client.catalog);
        prepare_job(args, find_volumes(&client, &wanted).await?)
    };
    let code = exec_main(prepare, identity, choices, Some(place), format);
    drop(directory);
    drop(remover);
    code
}

fn prepare_job(args: &ExecArgs, mounts: Vec<MountSpec>) -> Result<JobSpec, ExecStartError> {
    check_single_writer(&mounts)?;
    let (executable, arguments) = args.program.split_first().context("a program is needed")?;
    let directory = std::env::current_dir().context("the working directory no longer exists")?;
    Ok(JobSpec {
        name: executable.clone(),
        command: JobCommand {
            executable: executable.clone(),
            arguments: arguments.to_vec(),
            environment: BTreeMap::new(),
            directory: directory.to_string_lossy().into_owned(),
            stdout: None,
            stderr: None,
            shared_directories: args.share.clone(),
            required_files: Vec::new(),
            produced_files: Vec::new(),
        },
        mounts,
        op_deadline_ms: args.operation_timeout.saturating_mul(SECOND_MS),
        limits: JobLimits::default(),
    })
}

fn failure_format(output: Printer) -> FailureFormat {
    match output.is_json() {
        true => FailureFormat::Json,
        false => FailureFormat::Text,
    }
}

/// Says, as for what fails later, why a program was not begun.
fn report_start_error(not_begun: &ExecStartError, format: FailureFormat) -> ExitCode {
    let line = format_start_error(not_begun, format);
    let _ = writeln!(io::stderr(), "{}", terminal_text::sanitize_lines(&line));
    ExitCode::from(EXIT_ENVIRONMENT)
}

fn format_start_error(not_begun: &ExecStartError, format: FailureFormat) -> String {
    let ExecStartError { volume, error } = not_begun;
    let known = error.downcast_ref::<bafs_proto::Error>();
    let directory = error.downcast_ref::<TemporaryDirectoryError>();
    let code = match (known, directory) {
        (Some(error), _) => error.code,
        (None, Some(error)) => error.code(),
        (None, None) if class_of(error) == FailureClass::Unreachable => ErrorCode::Unreachable,
        // What no server said is what is not to be found.
        (None, None) => ErrorCode::NotFound,
    };
    let advice = match (format, code) {
        (FailureFormat::Text, ErrorCode::TokenInvalid | ErrorCode::RightMissing)
            if known.is_some() =>
        {
            "; ask the owner of the cluster for a token that grants it (`bafs grant`)"
        }
        _ => "",
    };
    let failure = EnvironmentFailure {
        code,
        volume: volume.as_deref(),
        detail: &format!("{error:#}{advice}"),
    };
    failure.format_line(format)
}

/// Runs `bafs mount`.
pub(crate) fn run_mount(args: &MountArgs, output: Printer) -> Result<ExitCode> {
    check_mount_point(&args.directory)?;
    let wanted = MountRequest {
        volume: args.volume.clone(),
        path: args.directory.to_string_lossy().into_owned(),
        access: match (args.read_only, args.write_back) {
            (true, _) => MountAccess::ReadOnly,
            (false, false) => MountAccess::ReadWrite,
            (false, true) => MountAccess::WriteBack,
        },
    };
    let found = find_volumes_on_thread(&args.client, &[wanted]);
    let mounts = found.map_err(|not_begun| not_begun.error)?;
    let mount = mounts
        .into_iter()
        .next()
        .context("one volume was asked for")?;
    let identity = init::load_identity(&args.client.identity, Role::Agent)?;
    let op_deadline_ms = args.operation_timeout.saturating_mul(SECOND_MS);
    Ok(bafs_client::entry_points::mount_main(
        mount,
        &args.directory,
        identity,
        op_deadline_ms,
        // Programs on the host outlive the agent, and do not run again.
        agent_choices(args.explain, args.delegate, Durability::OnClose),
        failure_format(output),
    ))
}

/// What a killed mount left on a directory fails in other ways, and is taken away before the new
/// one comes.
fn check_mount_point(directory: &Path) -> Result<()> {
    let refused = |why: &str| {
        let shown = directory.display();
        Err(UsageError::from_reason(format!("{shown} {why}")))
    };
    match std::fs::metadata(directory) {
        Ok(found) if !found.is_dir() => refused("is not a directory; name a directory"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            refused("does not exist; create the directory with mkdir")
        }
        _ => Ok(()),
    }
}

/// Runs `bafs agent`.
pub(crate) fn run_agent(args: &AgentArgs) -> ExitCode {
    let choices = agent_choices(false, args.delegate, Durability::OnSync);
    if args.spawner {
        return bafs_client::agent_spawner::serve_agent_orders(&args.identity, choices);
    }
    if let Some(group) = args.control_group.clone() {
        bafs_client::control_group::set_job_group(group);
    }
    let memory = args.shared_memory.as_deref().map(parse_bytes);
    let memory_bytes = match memory.transpose().context("--shared-memory") {
        Ok(bytes) => bytes.unwrap_or(0),
        Err(error) => {
            let _ = writeln!(io::stderr(), "bafs: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let temporary = args
        .temporary_directory
        .clone()
        .map(|directory| TemporaryLocation {
            directory,
            memory_bytes,
        });
    bafs_client::entry_points::agent_main(
        &args.identity,
        args.output_prefix.as_deref(),
        choices,
        temporary,
    )
}

fn agent_choices(
    explain: bool,
    DelegateArgs { delegate }: DelegateArgs,
    promise: Durability,
) -> AgentOptions {
    let explain = if explain { Explain::Yes } else { Explain::No };
    let delegate = delegate.then_some(promise);
    AgentOptions {
        explain,
        durability: delegate,
    }
}

/// A volume as the command line names it.
#[derive(Debug, Clone)]
struct MountRequest {
    volume: String,
    path: String,
    access: MountAccess,
}

/// How a volume is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MountAccess {
    ReadOnly,
    ReadWrite,
    /// To write to, and the kernel may collect the writes.
    WriteBack,
}

/// Refuses places where no machine shows a volume, and those of several.
fn check_mount_paths(wanted: &[MountRequest]) -> Result<()> {
    for (at, one) in wanted.iter().enumerate() {
        for other in &wanted[..at] {
            let (one, other) = (&one.path, &other.path);
            if one == other {
                return usage_error(format!(
                    "two volumes are mounted at {one}; give each its own path"
                ));
            }
            let places = [Path::new(one), Path::new(other)];
            // In a root of its own, a job has the others.
            if one == ROOT_PATH || other == ROOT_PATH {
                continue;
            }
            if places[0].starts_with(places[1]) || places[1].starts_with(places[0]) {
                return usage_error(format!(
                    "mount paths {one} and {other} overlap; give separate paths"
                ));
            }
        }
    }
    let volumes = wanted.iter().map(|want| VolumeBind {
        name: want.volume.clone(),
        source: PathBuf::new(),
        path: want.path.clone().into(),
        access: sandbox::Access::ReadOnly,
    });
    let plan = JobPlan {
        job: String::new(),
        volumes: volumes.collect(),
        program: "any".into(),
        arguments: Vec::new(),
        environment: Vec::new(),
        working_directory: PathBuf::new(),
        user: sandbox::JobUser::SameUser,
        session: JobSession::NewSession,
        temporary: None,
    };
    plan.check().or_else(|error| usage_error(error.to_string()))
}

/// A volume has one writer.
fn check_single_writer(mounts: &[MountSpec]) -> Result<()> {
    for (at, one) in mounts.iter().enumerate() {
        let again = |other: &&MountSpec| other.target == one.target;
        let writes = |other: &MountSpec| one.writable || other.writable;
        if mounts[..at].iter().find(again).is_some_and(writes) {
            let name = &one.name;
            return usage_error(format!(
                "{name} is mounted twice, once for writing; mount it once, or both times with :ro"
            ));
        }
    }
    Ok(())
}

fn usage_error(why: String) -> Result<()> {
    Err(UsageError::from_reason(format!("--mount: {why}")))
}

fn parse_mount(text: &str) -> Result<MountRequest> {
    let Some((volume, rest)) = text.split_once(":/").filter(|(name, _)| !name.is_empty()) else {
        return Err(UsageError::from_reason(format!(
            "--mount {text}: write VOLUME:/absolute/path or VOLUME:/absolute/path:ro"
        )));
    };
    let (path, access) = match rest.rsplit_once(':') {
        None => (rest, MountAccess::ReadWrite),
        Some((path, "rw")) => (path, MountAccess::ReadWrite),
        Some((path, "ro")) => (path, MountAccess::ReadOnly),
        Some((path, "write-back")) => (path, MountAccess::WriteBack),
        Some((_, other)) => {
            return Err(UsageError::from_reason(format!(
                "--mount {text}: unknown option '{other}'; append :ro, :rw or :write-back, also to \
                 a path with a colon"
            )));
        }
    };
    Ok(MountRequest {
        volume: volume.to_owned(),
        path: format!("/{path}"),
        access,
    })
}

/// Finds volumes through the catalog on a thread of its own whose runtime is gone on return, so
/// that this process has one thread again.
fn find_volumes_on_thread(
    args: &ClientArgs,
    wanted: &[MountRequest],
) -> Result<Vec<MountSpec>, ExecStartError> {
    std::thread::scope(|scope| {
        let finding = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot search for volumes")?;
            let found = runtime.block_on(async {
                let client = ClusterClient::new(args)?;
                find_volumes(&client, wanted).await
            });
            runtime.shutdown_background();
            found
        });
        finding
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the search for volumes failed").into()))
    })
}

async fn find_volumes(
    client: &ClusterClient,
    wanted: &[MountRequest],
) -> Result<Vec<MountSpec>, ExecStartError> {
    let mut mounts = Vec::with_capacity(wanted.len());
    let Some(first) = wanted.first() else {
        return Ok(mounts);
    };
    let of = |volume: &str, error| ExecStartError {
        volume: Some(volume.to_owned()),
        error,
    };
    let listed = client.list_volumes_for_search().await;
    let listed = listed.map_err(|error| of(&first.volume, error))?;
    for want in wanted {
        let found = client.find_volume_in(&listed, &want.volume).await;
        let (node, status) = found.map_err(|error| of(&want.volume, error))?;
        mounts.push(resolve_mount(client, &node, &status, want)?);
    }
    Ok(mounts)
}

fn resolve_mount(
    client: &ClusterClient,
    node: &Advert,
    status: &VolumeStatus,
    want: &MountRequest,
) -> Result<MountSpec> {
    let (server, volume) = (node.address.clone(), status.spec.id);
    let (target, writable) = match status.spec.kind {
        VolumeKind::Scratch { .. } => {
            let writable = want.access != MountAccess::ReadOnly;
            (MountTarget::Scratch { server, volume }, writable)
        }
        VolumeKind::Cache { .. } if want.access == MountAccess::WriteBack => {
            let name = &status.spec.name;
            return Err(UsageError::from_reason(format!(
                "volume {name} is a cache and cannot be written; mount it without write-back"
            )));
        }
        VolumeKind::Cache { .. } => (MountTarget::Cache { server, volume }, false),
    };
    let rights: &[Right] = if writable {
        &[Right::Read, Right::Write]
    } else {
        &[Right::Read]
    };
    Ok(MountSpec {
        name: status.spec.name.clone(),
        path: want.path.clone(),
        target,
        writable,
        write_back: want.access == MountAccess::WriteBack,
        token: client.issue_token(Resource::Volume(volume), rights)?,
        lifetime_ms_min: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_argument_selects_the_access_mode() {
        let mount = |text: &str| parse_mount(text).map(|it| (it.volume, it.path, it.access));
        let v = |path: &str, access| ("v".to_owned(), path.to_owned(), access);
        assert_eq!(mount("v:/a").unwrap(), v("/a", MountAccess::ReadWrite));
        assert_eq!(
            mount("v:/a/b:rw").unwrap(),
            v("/a/b", MountAccess::ReadWrite)
        );
        assert_eq!(mount("v:/a:ro").unwrap(), v("/a", MountAccess::ReadOnly));
        assert_eq!(
            mount("v:/a:b:ro").unwrap(),
            v("/a:b", MountAccess::ReadOnly)
        );
        let back = v("/a", MountAccess::WriteBack);
        assert_eq!(mount("v:/a:write-back").unwrap(), back);
        for wrong in ["v", ":/a", "v:a", "v:/a:RO", "v:/a:xx", "v:/a:"] {
            assert!(mount(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn invalid_mount_points_are_usage_errors() {
        let refusal = |mounts: &[&str]| {
            let wanted = mounts.iter().map(|text| parse_mount(text).unwrap());
            check_mount_paths(&wanted.collect::<Vec<_>>()).err()
        };
        assert!(refusal(&["v:/a", "w:/b"]).is_none());
        assert!(refusal(&["v:/", "w:/b"]).is_none());
        for wrong in [
            &["v:/proc"][..],
            &["v:/dev/shm/z"],
            &["v:/", "w:/"],
            &["v:/a/../b"],
            &["v:/a", "w:/a"],
            &["v:/a", "w:/a/b"],
            &["v:/a/b", "w:/a"],
        ] {
            let refused = refusal(wrong).expect("no machine can do it");
            assert!(UsageError::is_cause_of(&refused), "{refused}");
        }
        assert!(UsageError::is_cause_of(&parse_mount("work").unwrap_err()));
    }

    #[test]
    fn start_errors_are_told_in_words() {
        let told = |error: anyhow::Error, format| {
            let volume = Some("v".to_owned());
            format_start_error(&ExecStartError { volume, error }, format)
        };
        let missing = || anyhow!("no volume 'v' on any live node; see `bafs volume list`");
        assert_eq!(
            told(missing(), FailureFormat::Text),
            "bafs: no volume 'v' on any live node; see `bafs volume list`"
        );
        let line = told(missing(), FailureFormat::Json);
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&line["code"], &line["volume"]), (&402.into(), &"v".into()));
        let refused = bafs_proto::Error::new(ErrorCode::RightMissing, "the token grants nothing");
        let refused = anyhow::Error::new(refused).context("cannot ask the catalog");
        assert_eq!(
            told(refused, FailureFormat::Text),
            "bafs: cannot ask the catalog: the token grants nothing (RightMissing); ask the owner \
             of the cluster for a token that grants it (`bafs grant`)"
        );
    }

    #[test]
    fn mount_point_must_be_an_existing_directory() {
        let directory = tempfile::tempdir().unwrap();
        assert!(check_mount_point(directory.path()).is_ok());
        let path = directory.path().join("it");
        let refused = check_mount_point(&path).unwrap_err();
        assert!(UsageError::is_cause_of(&refused) && refused.to_string().contains("mkdir"));
        std::fs::write(&path, "a file").unwrap();
        let refused = check_mount_point(&path).unwrap_err();
        assert!(UsageError::is_cause_of(&refused), "{refused}");
    }
}
