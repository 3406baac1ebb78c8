//! `bafs home`, `bafs catalog`, `bafs node`: a server until it is told to stop.

mod restart;

use std::io;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use bafs_client::signals::{StopSignal, wait_for_stop_signal};
use bafs_proto::ErrorCode;
use bafs_proto::message::Role;
use bafs_server::catalog::{self, CatalogConfig};
use bafs_server::clock;
use bafs_server::home_clients::HomeSettings;
use bafs_server::home_server::{self, HomeConfig};
use bafs_server::node::{self, NodeConfig};
use bafs_server::serving::RunningServer;
use bafs_server::start_error::{StartError, StartErrorCause};
use bafs_workflow::{Url, parse_duration};
use nix::sys::signal::Signal;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};

use crate::args::{CatalogArgs, HomeArgs, NodeArgs, ServerArgs, UsageError};
use crate::init;
use crate::metrics;
use crate::output::Printer;
use crate::program_file::program_file;
use crate::units::{format_bytes, parse_bytes, parse_rate_limit};

/// Runs a home server.
pub(crate) async fn run_home(args: HomeArgs, output: Printer) -> Result<()> {
    check_home_name(&args.name)?;
    check_listen(&args.server.listen)?;
    check_reachable(&args.server.listen, args.catalog.as_deref())?;
    let root = resolve_export(&args.export)?;
    let config = HomeConfig {
        listen: args.server.listen.clone(),
        identity: init::load_identity(&args.server.identity, Role::Server)?,
        root,
        name: args.name,
        catalog: args.catalog,
        group: String::new(),
        limit_bytes_per_s: parse_rate_limit(args.rate_limit.as_deref())?,
    };
    let server = explain_start_error(home_server::start(config).await)?;
    serve_until_stopped(server, &args.server, output).await
}

/// The directory that `--export` names, whole.
pub(crate) fn resolve_export(directory: &Path) -> Result<PathBuf> {
    directory.canonicalize().map_err(|error| {
        anyhow!(
            "cannot export {}: {error}; give an existing directory with --export",
            directory.display()
        )
    })
}

/// What `--homes` says.
fn read_home_settings(path: &Path) -> Result<HomeSettings> {
    HomeSettings::load(path).map_err(|error| match error.code {
        ErrorCode::NotFound => anyhow!("{error}; give an existing file with --homes (BAFS_HOMES)"),
        _ => error.into(),
    })
}

/// Adds to the error of a server that did not start what helps.
fn explain_start_error(started: Result<RunningServer, StartError>) -> Result<RunningServer> {
    started.map_err(|error| match start_error_remedy(&error) {
        Some(remedy) => anyhow!("{error}; {remedy}"),
        None => error.into(),
    })
}

/// What helps where the system refused something to a server that starts.
fn start_error_remedy(start: &StartError) -> Option<&'static str> {
    match (start.cause, start.error.code) {
        (StartErrorCause::Listen, ErrorCode::Conflict) => {
            Some("another process uses this port; choose another --listen, or stop that process")
        }
        (StartErrorCause::Listen, ErrorCode::NotFound) => {
            Some("give an address of this machine with --listen; `ip address` lists them")
        }
        (StartErrorCause::Listen, ErrorCode::RightMissing) => {
            Some("ports below 1024 are for root; choose another --listen")
        }
        (StartErrorCause::Store(Some(kind)), _) => match kind {
            io::ErrorKind::NotADirectory => {
                Some("give a directory with --store; the node creates it if needed")
            }
            io::ErrorKind::AlreadyExists => {
                Some("it is not a directory; give a directory with --store")
            }
            io::ErrorKind::PermissionDenied => {
                Some("give a directory with --store that this user may write")
            }
            _ => None,
        },
        _ => None,
    }
}

/// Runs a catalog.
pub(crate) async fn run_catalog(args: CatalogArgs, output: Printer) -> Result<()> {
    check_listen(&args.server.listen)?;
    let config = CatalogConfig {
        listen: args.server.listen.clone(),
        identity: init::load_identity(&args.server.identity, Role::Server)?,
    };
    let server = explain_start_error(catalog::start(config).await)?;
    serve_until_stopped(server, &args.server, output).await
}

/// Runs a node.
pub(crate) async fn run_node(args: NodeArgs, output: Printer) -> Result<()> {
    check_listen(&args.server.listen)?;
    check_reachable(&args.server.listen, args.catalog.as_deref())?;
    let slots = match args.slots {
        Some(slots) => slots,
        None => u32::try_from(std::thread::available_parallelism()?.get())?,
    };
    let name = match args.name {
        Some(name) => name,
        None => nix::unistd::gethostname()?.to_string_lossy().into_owned(),
    };
    if slots > 0
        && let Err(error) = tokio::task::block_in_place(crate::machine_check::check_machine)
    {
        tracing::warn!("it stores volumes, but {error:#}");
    }
    if args.enable_rings
        && let Err(error) = bafs_client::fuse::enable_rings()
    {
        tracing::warn!("--enable-rings: the kernel stays without rings: {error}");
    }
    let homes = args.homes.as_deref().map(read_home_settings).transpose()?;
    let config = NodeConfig {
        listen: args.server.listen.clone(),
        identity: init::load_identity(&args.server.identity, Role::Server)?,
        store: args.store,
        capacity_bytes: parse_bytes(&args.size).context("--size")?,
        capacity_files: args.files,
        catalog: args.catalog,
        group: args.group.unwrap_or_default(),
        name,
        slots,
        agent_program: program_file()?.to_owned(),
        agent_memory_bytes: args
            .agent_memory
            .as_deref()
            .map(parse_bytes)
            .transpose()
            .context("--agent-memory")?,
        temporary_bytes: args
            .tmp
            .as_deref()
            .map(parse_bytes)
            .transpose()
            .context("--tmp")?,
        shared_memory_bytes: args
            .shared_memory
            .as_deref()
            .map(parse_bytes)
            .transpose()
            .context("--shared-memory")?,
        agent_identity: init::identity_directory(&args.server.identity, Role::Agent),
        homes: homes.unwrap_or_default(),
        trusts_peers: args.trust_peers,
        attributes: args.attributes.into_iter().collect(),
        lifetime: args.until.as_deref().map(parse_lifetime).transpose()?,
        catalog_timeout: args.catalog_timeout,
        grace: parse_grace(&args.grace)?,
    };
    let (store, offered) = (config.store.clone(), config.capacity_bytes);
    let server = explain_start_error(node::start(config).await)?;
    warn_of_oversized_offer(&store, offered);
    serve_until_stopped(server, &args.server, output).await
}

/// What `--until` says: a duration from now, or `@` and seconds since 1970 as in `date -d`.
fn parse_lifetime(text: &str) -> Result<Duration> {
    let invalid = |why: &dyn std::fmt::Display| {
        UsageError::from_reason(format!("--until {text} is invalid: {why}"))
    };
    let seconds = match text.strip_prefix('@') {
        Some(end) => {
            let end: u64 = end.parse().map_err(|error| invalid(&error))?;
            end.saturating_sub(clock::now().0 / 1_000)
        }
        None => parse_duration(text).map_err(|error| invalid(&error))?,
    };
    Ok(Duration::from_secs(seconds))
}

fn parse_grace(text: &str) -> Result<Duration> {
    let seconds = parse_duration(text);
    let seconds = seconds
        .map_err(|error| UsageError::from_reason(format!("--grace {text} is invalid: {error}")))?;
    Ok(Duration::from_secs(seconds))
}

/// Tells of a node that offers more than its disk has in all.
fn warn_of_oversized_offer(store: &Path, offered: u64) {
    let Some(all) = disk_bytes(store) else {
        return;
    };
    if offered > all {
        tracing::warn!(
            "--size offers {}, but the disk of {} has only {} in all: jobs may find it full; give \
             a smaller --size",
            format_bytes(offered.into()),
            store.display(),
            format_bytes(all.into())
        );
    }
}

/// All that the disk of a directory has, if that can be known.
pub(crate) fn disk_bytes(directory: &Path) -> Option<u64> {
    let found = nix::sys::statvfs::statvfs(directory).ok()?;
    Some(found.blocks().saturating_mul(found.fragment_size()))
}

/// A home is named by URLs, whose hosts have no blanks and no port in their names.
fn check_home_name(name: &str) -> Result<()> {
    let url = format!("bafs://{name}/").parse::<Url>();
    if url.is_ok_and(|url| !url.host.contains(':') && url.host.eq_ignore_ascii_case(name)) {
        return Ok(());
    }
    Err(UsageError::from_reason(format!(
        "--name '{}': the name cannot stand in a URL bafs://NAME/path; use letters A to Z, digits, \
         '-', '_' and '.'",
        name.escape_debug()
    )))
}

/// Others must be able to reach the address that a server advertises.
fn check_listen(listen: &str) -> Result<()> {
    let mut addresses = listen.to_socket_addrs().map_err(|error| {
        let why = format!("--listen {listen} is not an address such as 10.0.0.1:7000: {error}");
        UsageError::from_reason(why)
    })?;
    if addresses.any(|address| address.ip().is_unspecified()) {
        let why = "give the address by which other machines reach this one";
        return Err(UsageError::from_reason(format!("--listen {listen}: {why}")));
    }
    Ok(())
}

/// An address of this machine alone is of no use to a cluster whose catalog is elsewhere.
fn check_reachable(listen: &str, catalog: Option<&str>) -> Result<()> {
    let is_loopback = |address: &str| {
        let mut found = address.to_socket_addrs().ok()?;
        Some(found.all(|address| address.ip().is_loopback()))
    };
    let Some(catalog) = catalog else {
        return Ok(());
    };
    if is_loopback(listen) == Some(true) && is_loopback(catalog) == Some(false) {
        return Err(UsageError::from_reason(format!(
            "--listen {listen}: the cluster of the catalog {catalog} cannot reach this address; \
             give this machine's own (`--listen ADDRESS:0`)"
        )));
    }
    Ok(())
}

async fn serve_until_stopped(
    mut server: RunningServer,
    args: &ServerArgs,
    output: Printer,
) -> Result<()> {
    // Before anybody is told that it listens, and may want it to end.
    let asked = wait_for_stop_signal();
    let mut upgrade = signal(SignalKind::user_defined2())?;
    let address = server.address().to_string();
    let metrics = match &args.metrics {
        Some(at) => Some(metrics::start_endpoint(at, server.read_metrics())?.to_string()),
        None => None,
    };
    let also = metrics
        .as_ref()
        .map(|at| format!("; metrics at http://{at}/metrics"));
    let printed = output.print_result(
        &format!("listening at {address}{}", also.unwrap_or_default()),
        &serde_json::json!({ "listening": address, "metrics": metrics }),
    );
    if !restart::is_restarted() {
        printed?;
    }
    // Heard, it ends no server: a write past `ulimit -f` of whoever started it fails with EFBIG.
    let _ = signal(SignalKind::from_raw(Signal::SIGXFSZ as i32))?;
    let mut over = wait_for_stop(&mut server, asked, &mut upgrade, args).await;
    if matches!(over, ServerStop::Asked(StopSignal::Terminate)) && server.begin_end() {
        // A second signal ends it at once.
        over = wait_for_stop(&mut server, wait_for_stop_signal(), &mut upgrade, args).await;
    }
    server.stop().await;
    match over {
        ServerStop::Ended(Some(why)) => Err(why.into()),
        ServerStop::Upgrade => Err(restart::replace_process(&address).await),
        ServerStop::Ended(None) | ServerStop::Asked(_) => Ok(()),
    }
}

async fn wait_for_stop(
    server: &mut RunningServer,
    asked: impl Future<Output = StopSignal>,
    upgrade: &mut Signals,
    args: &ServerArgs,
) -> ServerStop {
    tokio::pin!(asked);
    let mut is_upgrading = false;
    loop {
        tokio::select! {
            signal = &mut asked => return ServerStop::Asked(signal),
            () = wait_for_stdin_end(), if args.until_stdin_closes => return ServerStop::Ended(None),
            fault = server.wait_for_end() => return match (fault, is_upgrading) {
                (None, true) => ServerStop::Upgrade,
                (fault, _) => ServerStop::Ended(fault),
            },
            Some(()) = upgrade.recv() => {
                if let Err(error) = restart::check_program().await {
                    tracing::warn!("the server goes on and does not start again: {error:#}");
                    continue;
                }
                is_upgrading = server.begin_restart();
                if !is_upgrading {
                    return ServerStop::Upgrade;
                }
            }
        }
    }
}

/// Why a server stops.
enum ServerStop {
    Asked(StopSignal),
    /// To start again from the program file, which may be a newer one.
    Upgrade,
    /// By itself, or with the process that started it; perhaps by a fault.
    Ended(Option<bafs_proto::Error>),
}

async fn wait_for_stdin_end() {
    let mut stdin = tokio::io::stdin();
    let mut ignored = [0; 256];
    while stdin.read(&mut ignored).await.is_ok_and(|count| count > 0) {}
}

#[cfg(test)]
mod tests {
    use bafs_proto::Error;

    use super::*;

    #[test]
    fn home_name_must_be_valid_in_a_url() {
        for good in ["home", "My_Data-2.example", "10.0.0.1"] {
            assert!(check_home_name(good).is_ok(), "{good}");
        }
        for bad in [
            "", " ", "my data", "home:1", "[::1]", "a/b", "größe", "me@home", "a\u{1b}", "a?",
        ] {
            let refused = check_home_name(bad).expect_err(bad).to_string();
            assert!(refused.contains("--name"), "{refused}");
        }
    }

    #[test]
    fn startup_errors_suggest_a_remedy() {
        let remedy = |cause, code| {
            start_error_remedy(&StartError {
                cause,
                error: Error::new(code, "no"),
            })
        };
        let taken = remedy(StartErrorCause::Listen, ErrorCode::Conflict);
        assert!(taken.is_some_and(|it| it.contains("choose another --listen")));
        let of_store = |kind| remedy(StartErrorCause::Store(kind), ErrorCode::ServerFault);
        let file = of_store(Some(io::ErrorKind::NotADirectory));
        assert!(file.is_some_and(|it| it.contains("give a directory with --store")));
        assert_eq!(of_store(Some(io::ErrorKind::OutOfMemory)), None);
        assert_eq!(remedy(StartErrorCause::Other, ErrorCode::Conflict), None);
    }

    #[test]
    fn unreachable_listen_address_is_refused() {
        let is_fine = |listen, catalog| check_reachable(listen, catalog).is_ok();
        assert!(is_fine("127.0.0.1:0", None));
        assert!(is_fine("127.0.0.1:0", Some("127.0.0.1:7000")));
        assert!(is_fine("10.0.0.2:0", Some("10.0.0.1:7000")));
        assert!(is_fine("10.0.0.2:0", Some("127.0.0.1:7000")));
        for listen in ["127.0.0.1:0", "127.0.0.2:7002", "[::1]:0"] {
            assert!(!is_fine(listen, Some("10.0.0.1:7000")), "{listen}");
        }
    }
}
