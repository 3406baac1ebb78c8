//! The one program that a user installs: parses arguments and calls the libraries.
//!
//! A library as well, so that tests start the same throw-away clusters as the demo does.

mod args;
mod client;
pub mod cluster;
pub mod demo;
mod display;
mod doctor;
mod grant;
mod graph;
mod history;
mod init;
mod input_file;
mod job;
mod live;
mod logs;
mod metrics;
mod output;
mod own_directory;
pub mod picture;
mod plan;
mod rate;
#[cfg(test)]
mod reference;
mod report;
mod run;
mod serve;
mod sim;
mod status;
mod steer;
mod visible;
mod volume;
mod workflow_file;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bafs_proto::net::channel::{self, Channel};
use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{
    AgentArgs, CatalogArgs, ChannelChoice, Cli, Command, EXIT_WRONG_USE, ExecArgs, HomeArgs,
    MountArgs, NodeArgs, WrongUse,
};
use output::{Output, ReaderGone};

/// What is told without `BAFS_LOG`. A reply that nobody waits for any more is no news: its program
/// was ended.
const FILTER: &str = "warn,fuser::reply=off";

/// Exit code of a command that failed.
const FAILED: u8 = 1;

/// Exit code of a command whose reader has gone: what a shell says of one that SIGPIPE ended.
const READER_GONE: u8 = 128 + 13;

/// Runs the program as the command line says, and returns its exit code.
pub fn main() -> ExitCode {
    // A job's first process is this program, too, re-executed; it must not parse anything.
    bafs_client::sandbox::dispatch_job_init();
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("BAFS_LOG").unwrap_or_else(|_| EnvFilter::new(FILTER));
    // https://no-color.org
    let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(wants_colour && std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        // Nobody hears of it where standard error is gone, and to say so there would be a panic.
        .log_internal_errors(false)
        .init();
    match dispatch(cli) {
        Ok(code) => code,
        Err(error) if error.downcast_ref::<ReaderGone>().is_some() => ExitCode::from(READER_GONE),
        Err(error) => {
            eprintln!("{}", visible::lines(&format!("bafs: {error:#}")));
            let is_wrong_use = WrongUse::is_why(&error);
            ExitCode::from(if is_wrong_use { EXIT_WRONG_USE } else { FAILED })
        }
    }
}

fn dispatch(cli: Cli) -> Result<ExitCode> {
    let output = Output::new(cli.json);
    channel::choose(match cli.channel {
        ChannelChoice::Auto => Channel::Auto,
        ChannelChoice::Quic => Channel::Quic,
        ChannelChoice::Tcp => Channel::Tcp,
    });
    if let Command::Agent(AgentArgs { memory, .. })
    | Command::Exec(ExecArgs { memory, .. })
    | Command::Mount(MountArgs { memory, .. }) = &cli.command
    {
        bafs_client::memory::bound(rate::parse_bytes(&memory.memory).context("--memory")?);
    }
    if let Command::Home(HomeArgs { server, .. })
    | Command::Catalog(CatalogArgs { server, .. })
    | Command::Node(NodeArgs { server, .. }) = &cli.command
    {
        let bytes_max = rate::parse_bytes(&server.memory).context("--memory")?;
        bafs_proto::net::bound_requests(bytes_max);
    }
    match cli.command {
        // These three enter a private name space, which a process with threads may not.
        Command::Agent(args) => return Ok(job::agent(&args)),
        Command::Exec(args) => return job::exec(&args),
        Command::Mount(args) => return job::mount(&args),
        Command::Init(args) => init::init(&args, output)?,
        Command::Check(args) => workflow_file::check(&args.workflow, output)?,
        Command::Sim(args) => sim::run(&args, output)?,
        Command::Prefer(args) => steer::prefer(&args, output)?,
        Command::Cancel(args) => steer::cancel(&args, output)?,
        Command::Replay(args) => history::replay_all(&args, output)?,
        Command::Status(args) => status::run(&args, output)?,
        Command::Report(args) => report::run(&args, output)?,
        Command::Graph(args) => graph::run(&args, output)?,
        Command::Why(args) => history::why(&args, output)?,
        Command::Logs(args) => logs::logs(&args, output)?,
        Command::Doctor(args) => return doctor::run(&args, output),
        command => return run_async(command, output),
    }
    Ok(ExitCode::SUCCESS)
}

fn run_async(command: Command, output: Output) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        match command {
            Command::Home(args) => serve::home(args, output).await,
            Command::Catalog(args) => serve::catalog(args, output).await,
            Command::Node(args) => serve::node(args, output).await,
            Command::Servers(args) => volume::servers(args, output).await,
            Command::Volume(command) => volume::run(command, output).await,
            Command::Grant(args) => grant::grant(args, output).await,
            Command::Plan(args) => plan::run(&args, output).await,
            Command::Run(args) => return run::run(args, output).await,
            Command::Demo(args) => return demo::demo(args, output).await,
            _ => Ok(()),
        }
        .map(|()| ExitCode::SUCCESS)
    });
    // A thread that reads standard input for ever must not keep the program.
    runtime.shutdown_background();
    result
}
