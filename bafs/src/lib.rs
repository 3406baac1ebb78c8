//! The one program that a user installs: parses arguments and calls the libraries.
//!
//! A library as well, so that tests start the same throw-away clusters as the demo does.

mod args;
mod beside_files;
mod cached_data;
mod class_ad;
mod client;
pub mod cluster;
mod condor_transfer;
mod config;
mod config_command;
pub mod demo;
mod doctor;
mod drain;
mod failure;
mod failure_groups;
mod finding;
mod followed_log;
mod gantt_chart;
mod grant;
mod graph;
mod history;
mod home_files;
mod home_view;
mod html_text;
mod image;
mod import;
mod init;
mod input_file;
mod job;
mod learned;
mod live_environment;
mod locked_directory;
mod logs;
mod machine_check;
mod machine_programs;
mod metrics;
mod mount_helper;
mod output;
mod page;
mod plan;
mod policies;
mod pool;
mod profile;
mod program_file;
mod progress_display;
#[cfg(test)]
mod reference;
mod report;
mod run;
mod run_control;
mod serve;
mod service;
mod sim;
mod sizes;
mod status;
pub mod svg_chart;
mod terminal_text;
mod traffic;
mod units;
mod volume;
mod workflow_file;
mod workflow_findings;
mod workflow_format;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bafs_proto::net::channel::{self, Channel};
use tracing_subscriber::EnvFilter;

use args::{
    AgentArgs, CatalogArgs, ChannelChoice, Cli, CliCommand, EXIT_USAGE_ERROR, ExecArgs, HomeArgs,
    MountArgs, NodeArgs, ServiceCommand, UsageError,
};
use output::{Printer, StdoutClosed};

/// What is told without `BAFS_LOG`. A reply that nobody waits for any more is no news: its program
/// was ended.
const LOG_FILTER_DEFAULT: &str = "warn,fuser::reply=off";

/// Exit code of a command that failed.
const EXIT_FAILED: u8 = 1;

/// Exit code of a command whose reader has gone: what a shell says of one that SIGPIPE ended.
const EXIT_STDOUT_CLOSED: u8 = 128 + 13;

/// Runs the program as the command line says, and returns its exit code.
pub fn main() -> ExitCode {
    // A job's first process is this program, too, re-executed; it must not parse anything.
    bafs_client::sandbox::dispatch_job_init();
    bafs_client::signals::disregard_restart_signal();
    program_file::note_program_file();
    if let Some(code) = mount_helper::dispatch().or_else(condor_transfer::dispatch) {
        return code;
    }
    let cli = Cli::from_process(volume::print_wrong_words);
    let filter =
        EnvFilter::try_from_env("BAFS_LOG").unwrap_or_else(|_| EnvFilter::new(LOG_FILTER_DEFAULT));
    // https://no-color.org
    let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(wants_colour && std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        // Nobody hears of it where standard error is gone, and to say so there would be a panic.
        .log_internal_errors(false)
        .init();
    match run_command(cli) {
        Ok(code) => code,
        Err(error) if error.downcast_ref::<StdoutClosed>().is_some() => {
            ExitCode::from(EXIT_STDOUT_CLOSED)
        }
        Err(error) => {
            eprintln!(
                "{}",
                terminal_text::sanitize_lines(&format!("bafs: {error:#}"))
            );
            let is_wrong_use = UsageError::is_cause_of(&error);
            ExitCode::from(if is_wrong_use {
                EXIT_USAGE_ERROR
            } else {
                EXIT_FAILED
            })
        }
    }
}

fn run_command(cli: Cli) -> Result<ExitCode> {
    let output = Printer::new(cli.global.json);
    channel::set_channel(match cli.global.channel {
        ChannelChoice::Auto => Channel::Auto,
        ChannelChoice::Quic => Channel::Quic,
        ChannelChoice::Tcp => Channel::Tcp,
    });
    if let CliCommand::Agent(AgentArgs { memory, .. })
    | CliCommand::Exec(ExecArgs { memory, .. })
    | CliCommand::Mount(MountArgs { memory, .. }) = &cli.command
    {
        bafs_client::memory::limit_memory(units::parse_bytes(&memory.memory).context("--memory")?);
    }
    if let CliCommand::Home(HomeArgs { server, .. })
    | CliCommand::Catalog(CatalogArgs { server, .. })
    | CliCommand::Node(NodeArgs { server, .. }) = &cli.command
    {
        let bytes_max = units::parse_bytes(&server.memory).context("--memory")?;
        bafs_proto::net::set_request_memory_max(bytes_max);
    }
    match cli.command {
        // These four enter a private name space, which a process with threads may not.
        CliCommand::Agent(args) => return Ok(job::run_agent(&args)),
        CliCommand::Exec(args) => return job::run_exec(&args, output),
        CliCommand::Mount(args) => return job::run_mount(&args, output),
        CliCommand::Profile(args) => return profile::run_profile(&args, output),
        CliCommand::Init(args) => init::init(&args, output)?,
        CliCommand::Check(args) => return workflow_file::check_workflow(&args, output),
        CliCommand::Fmt(args) => return workflow_format::run(&args, output),
        CliCommand::Sim(args) => sim::run_simulations(&args, output)?,
        CliCommand::Import(command) => return import::run_import(&command, output),
        CliCommand::Config(args) => config_command::show_config(&args, output)?,
        CliCommand::Completions(args) => config_command::print_completions(&args)?,
        CliCommand::ManPages(args) => config_command::write_man_pages(&args, output)?,
        CliCommand::Policies => policies::run(output)?,
        CliCommand::Prefer(args) => run_control::prefer_pipeline(&args, output)?,
        CliCommand::Cancel(args) => run_control::cancel_pipeline(&args, output)?,
        CliCommand::Replay(args) => history::print_history(&args, output)?,
        CliCommand::Status(args) => status::show_status(&args, output)?,
        CliCommand::Report(args) => report::run_report(&args, output)?,
        CliCommand::Graph(args) => graph::run(&args, output)?,
        CliCommand::Why(args) => history::explain_name(&args, output)?,
        CliCommand::Sizes(args) => sizes::propose_sizes(&args, output)?,
        CliCommand::Logs(args) => logs::print_logs(&args, output)?,
        CliCommand::Doctor(args) => return doctor::run(&args, output),
        CliCommand::Service(ServiceCommand::Learned(command)) => {
            learned::run_learned_command(&command, output)?;
        }
        command => return run_async_command(command, output),
    }
    Ok(ExitCode::SUCCESS)
}

fn run_async_command(command: CliCommand, output: Printer) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        match command {
            CliCommand::Home(args) => serve::run_home(args, output).await,
            CliCommand::Catalog(args) => serve::run_catalog(args, output).await,
            CliCommand::Node(args) => serve::run_node(args, output).await,
            CliCommand::Servers(args) => volume::print_servers(args, output).await,
            CliCommand::Cache(command) => cached_data::run_cache_command(command, output).await,
            CliCommand::Drain(args) => drain::drain_node(args, output).await,
            CliCommand::Grant(args) => grant::grant(args, output).await,
            CliCommand::Plan(args) => plan::run_plan(&args, output).await,
            CliCommand::Volume(command) => {
                return volume::run_volume_command(command, output).await;
            }
            CliCommand::Run(args) => return run::run_workflow(args, output).await,
            CliCommand::Pool(command) => pool::run_pool_command(command, output).await,
            CliCommand::Service(command) => {
                return service::run_service_command(command, output).await;
            }
            CliCommand::Page(args) => page::show_page(&args, output).await,
            CliCommand::Demo(args) => return demo::run_demo(args, output).await,
            _ => Ok(()),
        }
        .map(|()| ExitCode::SUCCESS)
    });
    // A thread that reads standard input for ever must not keep the program.
    runtime.shutdown_background();
    result
}
