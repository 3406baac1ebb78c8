//! `bafs volume …` and `bafs servers`: the volume API, for people and other schedulers.

mod connection;
mod creation;
mod description;
mod download;
mod extract;
mod file_list;
mod kept;
mod server_view;
mod upkeep;
mod upload;
mod warm;
mod writer_session;

pub(crate) use creation::{create_on_node, owner_name};
pub(crate) use warm::warm_volumes;

use std::process::ExitCode;

use anyhow::Result;
use bafs_proto::attributes::Constraint;
use bafs_proto::cache::{CacheStatus, GetCache};
use bafs_proto::message::{Advert, DeleteVolume, InvalidateVolume, QueryServers};
use bafs_proto::token::Token;
use bafs_proto::volume::{VolumeKind, VolumeState, VolumeStatus};
use serde_json::{Value, json};

use crate::args::{
    ClientArgs, ServersArgs, UsageError, VolumeArgs, VolumeCommand, VolumeDeleteArgs,
};
use crate::client::ClusterClient;
use crate::failure::{ClassifiedError, FailureClass, class_of, failure_json};
use crate::output::{Printer, StdoutClosed};
use crate::terminal_text;
use connection::connect;
use description::{
    describe_wait, format_origin, format_status, kind_name, print_status, server_names, source_of,
    state_name, status_json,
};
use server_view::ServerView;

/// Runs a volume command. A failure has the exit code of its class; `--json` prints it as the only
/// line of standard output.
pub(crate) async fn run_volume_command(
    command: VolumeCommand,
    output: Printer,
) -> Result<ExitCode> {
    let ended = match command {
        VolumeCommand::Create(args) => creation::create_volume(args, output).await,
        VolumeCommand::List(args) => list_volumes(args, output).await,
        VolumeCommand::Show(args) => show_volume(args, output).await,
        VolumeCommand::Delete(args) => delete_volume(args, output).await,
        VolumeCommand::Renew(args) => upkeep::renew_volumes(args, output).await,
        VolumeCommand::Resize(args) => upkeep::resize_volume(args, output).await,
        VolumeCommand::Put(args) => upload::put_files(args, output).await,
        VolumeCommand::Get(args) => download::get_files(args, output).await,
        VolumeCommand::Ls(args) => file_list::list_files(args, output).await,
        VolumeCommand::Replicate(args) => creation::replicate_volume(args, output).await,
        VolumeCommand::Extract(args) => extract::extract_file(args, output).await,
        VolumeCommand::Invalidate(args) => invalidate_volume(args, output).await,
        VolumeCommand::Warm(args) => warm::warm_cache(args, output).await,
    };
    match ended {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.downcast_ref::<StdoutClosed>().is_some() => Err(error),
        Err(error) => report_failure(&error, output),
    }
}

/// Prints words that the parser refuses, for programs.
pub(crate) fn print_wrong_words(text: &str) {
    let refused = failure_json(&UsageError::from_reason(text));
    // Its reader may have gone, and the exit code says the same.
    let _ = Printer::new(true).print_result("", &refused);
}

fn report_failure(error: &anyhow::Error, output: Printer) -> Result<ExitCode> {
    if output.is_json() {
        output.print_result("", &failure_json(error))?;
    }
    let text = format!("bafs: {error:#}");
    eprintln!("{}", terminal_text::sanitize_lines(&text));
    Ok(ExitCode::from(class_of(error).exit_code()))
}

async fn list_volumes(args: ClientArgs, output: Printer) -> Result<()> {
    let (volumes, silent) = connect(&args)?.list_volumes().await?;
    for node in silent {
        eprintln!("warning: cannot list the volumes of a node: {node}");
    }
    if output.is_json() {
        let all: Vec<_> = volumes
            .iter()
            .map(|(node, v)| status_json(node, v))
            .collect();
        return output.print_result("", &all);
    }
    output.print_remark(&format!(
        "{:<32}  {:<16} {:<10} {:<8} {:<9} {:>14} {:>14}",
        "ID", "NAME", "NODE", "KIND", "STATE", "USED BYTES", "SIZE BYTES"
    ))?;
    for (node, v) in volumes {
        output.print_remark(&format!(
            "{:<32}  {:<16} {:<10} {:<8} {:<9} {:>14} {:>14}",
            v.spec.id,
            v.spec.name,
            node.name,
            kind_name(&v.spec.kind),
            state_name(v.state),
            v.used_bytes,
            v.spec.size_bytes
        ))?;
    }
    Ok(())
}

async fn show_volume(args: VolumeArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
    let (mut texts, mut all) = (Vec::new(), Vec::new());
    for (node, status) in client.find_volumes(&args.volume).await? {
        match describe_volume(&client, &node, &status).await {
            Ok((text, described)) => {
                texts.push(text);
                all.push(described);
            }
            // It was deleted meanwhile, and hides no other.
            Err(error) if class_of(&error) == FailureClass::Lost => {}
            Err(error) => return Err(error),
        }
    }
    match all.as_slice() {
        [] => Err(ClassifiedError::from_message(
            FailureClass::NotFound,
            format!("volume '{}' was deleted meanwhile", args.volume),
        )),
        [one] => output.print_result(&texts.join("\n"), one),
        several => output.print_result(&texts.join("\n"), &several),
    }
}

/// What is told of a volume, for people and for machines.
async fn describe_volume(
    client: &ClusterClient,
    node: &Advert,
    status: &VolumeStatus,
) -> Result<(String, Value)> {
    let cache: Option<CacheStatus> = match (&status.spec.kind, status.state) {
        (VolumeKind::Cache { .. }, VolumeState::Ready) => {
            let volume = status.spec.id;
            Some(client.call(&node.address, GetCache { volume }).await?)
        }
        // There is nothing to show of it yet.
        _ => None,
    };
    let mut described = status_json(node, status);
    let mut text = format_status(node, status);
    if source_of(&status.spec.kind).is_some() {
        let names = server_names(&client.list_servers(None).await.unwrap_or_default());
        text.push_str(&format_origin(&status.spec.kind, &names));
        let address = described["origin"]["address"].as_str().unwrap_or_default();
        described["origin"]["server"] = json!(names.get(address));
    }
    if status.state == VolumeState::Creating
        && let Some(waits) = describe_wait(&status.spec.kind)
    {
        text.push_str(&format!("\n  {waits}"));
        described["waiting_for"] = json!(waits);
    }
    if let Some(cache) = &cache {
        described["cache"] = warm::cache_json(cache);
        text.push_str(&warm::format_cache(cache));
    }
    Ok((text, described))
}

async fn delete_volume(args: VolumeDeleteArgs, output: Printer) -> Result<()> {
    let volume = match (&args.kept, &args.volume) {
        (Some(run), _) => return kept::delete_kept_volumes(&args.client, run, output).await,
        (None, volume) => volume.as_deref().unwrap_or_default(),
    };
    let client = connect(&args.client)?;
    let (node, status) = client.find_volume(volume).await?;
    client
        .call(
            &node.address,
            DeleteVolume {
                volume: status.spec.id,
            },
        )
        .await?;
    output.print_result(
        &format!("deleted {} ({})", status.spec.name, status.spec.id),
        &json!({ "deleted": status.spec.id.to_string() }),
    )
}

async fn invalidate_volume(args: VolumeArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    let source_token = match &status.spec.kind {
        VolumeKind::Cache { source, .. } => client.issue_source_token(source)?,
        // The node says what is wrong with that.
        VolumeKind::Scratch { .. } => Token::none(),
    };
    let call = InvalidateVolume {
        volume: status.spec.id,
        source_token,
    };
    let status = client.call(&node.address, call).await?;
    print_status(&node, &status, output)
}

/// `bafs servers`.
pub(crate) async fn print_servers(args: ServersArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let query = QueryServers {
        kind: None,
        constraint: Constraint(args.comparisons),
    };
    let servers = client.query_servers(query).await?;
    if output.is_json() {
        let shown: Vec<_> = servers.iter().map(ServerView::of).collect();
        return output.print_result("", &shown);
    }
    output.print_remark(&format!(
        "{:<16} {:<6} {:<22} {:<10} {:>16} {:>16} {:>7}",
        "NAME", "KIND", "ADDRESS", "GROUP", "FREE BYTES", "CAPACITY", "JOBS"
    ))?;
    for s in servers {
        output.print_remark(&format!(
            "{:<16} {:<6} {:<22} {:<10} {:>16} {:>16} {:>7}{}",
            s.name,
            format!("{:?}", s.kind).to_lowercase(),
            s.address,
            s.group,
            s.free_bytes,
            s.capacity_bytes,
            format!("{}/{}", s.jobs, s.slots),
            if s.lifetime.is_draining {
                " drains"
            } else {
                ""
            }
        ))?;
    }
    Ok(())
}
