//! `bafs submit`, `queue`, `hold`, `release`, `remove` and `user`: calls to a service, and what
//! their failures mean for scripts.

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use bafs_proto::ErrorCode;
use bafs_proto::bearer::Bearer;
use bafs_proto::error::ErrorClass;
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::queue_call::CallQueue;
use bafs_proto::time::{Deadline, Time};
use bafs_queue::{WorkflowId, WorkflowSummary};
use bafs_server::clock;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::calls::{Changed, PageOpened, QueueRequest, Submitted, WorkflowPage};
use super::submitted_text::read_submission;
use super::user_commands::run_user_command;
use crate::args::{
    EXIT_USAGE_ERROR, QueueArgs, ServiceArgs, ServiceCommand, SubmitArgs, UsageError,
    WorkflowNumberArgs,
};
use crate::client::load_user_identity;
use crate::home_view::HomeView;
use crate::output::Printer;
use crate::terminal_text;
use crate::units::format_bytes;

/// Time for a call, in milliseconds: a service that starts reads its journal first.
const CALL_TIMEOUT_MS: u64 = 30_000;

/// A service that is started again listens within a second.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// What a user's identity says of its service.
const SERVICE_FILE: &str = "service.json";

/// How the user of an identity reaches the service.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ServiceFile {
    pub(super) user: String,
    pub(super) service: String,
    pub(super) catalog: String,
}

impl ServiceFile {
    fn read(identity: &Path) -> Option<Self> {
        let bytes = fs::read(identity.join(SERVICE_FILE)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Keeps it beside an identity.
    pub(super) fn write(&self, identity: &Path) -> Result<()> {
        let path = identity.join(SERVICE_FILE);
        let bytes = serde_json::to_vec_pretty(self)?;
        fs::write(&path, bytes).with_context(|| path.display().to_string())
    }
}

/// A connection to a service with a person's rights.
pub(super) struct ServiceClient {
    pool: Pool,
    bearer: Bearer,
    pub(super) address: String,
    user: Option<String>,
    catalog: Option<String>,
}

impl ServiceClient {
    /// Connects as the command line says.
    pub(super) fn connect(args: &ServiceArgs) -> Result<Self> {
        let file = ServiceFile::read(&args.identity);
        let address = args.service.clone();
        let address = address.or_else(|| file.as_ref().map(|file| file.service.clone()));
        let unknown = || {
            UsageError::from_reason(
                "no service is named; give --service HOST:PORT, or the identity that `bafs user \
                 add` created",
            )
        };
        let identity = load_user_identity(&args.identity)?;
        Ok(Self {
            pool: Pool::new(Arc::new(Dialer::new(&identity)?)),
            bearer: Bearer::new(identity.token.clone(), identity.verifier.clone()),
            address: address.ok_or_else(unknown)?,
            user: file.as_ref().map(|file| file.user.clone()),
            catalog: file.map(|file| file.catalog),
        })
    }

    /// Asks, and asks once more if the connection broke: each request is safe to repeat.
    pub(super) async fn ask<R: DeserializeOwned>(&self, request: &QueueRequest) -> Result<R> {
        self.ask_for(self.user.clone(), request).await
    }

    /// The same for another user, which operators may.
    async fn ask_for<R: DeserializeOwned>(
        &self,
        user: Option<String>,
        request: &QueueRequest,
    ) -> Result<R> {
        let body = Bytes::from(serde_json::to_vec(request)?);
        let call = CallQueue { user };
        let now: Time = clock::now();
        let to_send = call.clone().into();
        let token = self
            .bearer
            .token_for_call(&self.address, &to_send, now, CALL_TIMEOUT_MS)?;
        let deadline = Deadline::after_ms(CALL_TIMEOUT_MS);
        let ask = || {
            let (call, body) = (call.clone(), body.clone());
            self.pool
                .call_with_body(&self.address, &token, call, body, deadline)
        };
        let answer = match ask().await {
            Err(error) if error.is_transient() => {
                tokio::time::sleep(RETRY_PAUSE).await;
                ask().await
            }
            answer => answer,
        };
        let (_, answer) = answer.with_context(|| format!("the service at {}", self.address))?;
        serde_json::from_slice(&answer).context("the answer of the service")
    }
}

/// Runs one of the commands; its exit code says what kind of failure there was.
pub(super) async fn run_client_command(
    command: ServiceCommand,
    output: Printer,
) -> Result<ExitCode> {
    let ended = match command {
        ServiceCommand::Submit(args) => submit(args, output).await,
        ServiceCommand::Queue(args) => list_queue(args, output).await,
        ServiceCommand::Hold(args) => change(args, "held", QueueRequest::Hold, output).await,
        ServiceCommand::Release(args) => {
            change(args, "released", QueueRequest::Release, output).await
        }
        ServiceCommand::Remove(args) => change(args, "removed", QueueRequest::Remove, output).await,
        ServiceCommand::User(command) => run_user_command(command, output).await,
        // They ask no service.
        ServiceCommand::Scheduler(_) | ServiceCommand::Learned(_) => Ok(()),
    };
    match ended {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => report_failure(error, output),
    }
}

/// Exit codes of these commands.
fn exit_code_of(error: &Error) -> u8 {
    if UsageError::is_cause_of(error) {
        return EXIT_USAGE_ERROR;
    }
    let Some(error) = error.downcast_ref::<bafs_proto::Error>() else {
        return 1;
    };
    match (error.code, error.class()) {
        (ErrorCode::NotFound, _) => 4,
        (ErrorCode::WrongState | ErrorCode::Conflict, _) => 5,
        (ErrorCode::TooLarge, _) | (_, ErrorClass::NoSpace) => 6,
        (_, ErrorClass::Denied) => 3,
        (_, ErrorClass::Transient) => 75,
        _ => 1,
    }
}

fn report_failure(error: Error, output: Printer) -> Result<ExitCode> {
    let code = exit_code_of(&error);
    let text = format!("{error:#}");
    if output.is_json() {
        let found = error.downcast_ref::<bafs_proto::Error>();
        let shown = serde_json::json!({
            "error": {
                "class": found.map(|error| format!("{:?}", error.class())),
                "code": found.map(|error| format!("{:?}", error.code)),
                "text": text,
            },
        });
        output.print_result("", &shown)?;
    }
    eprintln!(
        "{}",
        terminal_text::sanitize_lines(&format!("bafs: {text}"))
    );
    Ok(ExitCode::from(code))
}

async fn submit(args: SubmitArgs, output: Printer) -> Result<()> {
    let client = ServiceClient::connect(&args.service)?;
    let homes = match &client.catalog {
        Some(catalog) => HomeView::of_cluster(&args.service.identity, catalog, &args.workflow)?,
        None => HomeView::from_environment(&args.workflow),
    };
    let read = || read_submission(&args.workflow, &homes, args.priority);
    let submission = tokio::task::block_in_place(read)?;
    let name = submission.name.clone();
    let user = args.user.clone().or_else(|| client.user.clone());
    let request = QueueRequest::Submit(submission);
    let Submitted { workflow } = client.ask_for(user, &request).await?;
    output.print_result(
        &format!("{name} is workflow {workflow}; `bafs queue` shows how far it is"),
        &serde_json::json!({ "workflow": workflow, "name": name }),
    )
}

/// Changes all workflows that can be changed, and fails as the first of the others did.
async fn change(
    args: WorkflowNumberArgs,
    word: &str,
    request: fn(WorkflowId) -> QueueRequest,
    output: Printer,
) -> Result<()> {
    let client = ServiceClient::connect(&args.service)?;
    let (mut changed, mut refused) = (Vec::new(), Vec::new());
    for number in &args.workflows {
        match client.ask(&request(WorkflowId(*number))).await {
            Ok(Changed {}) => changed.push(*number),
            Err(error) => refused.push((*number, error)),
        }
    }
    let join = |numbers: &[u64]| {
        let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        numbers.join(", ")
    };
    if !changed.is_empty() {
        output.print_result(
            &format!("{word}: {}", join(&changed)),
            &serde_json::json!({ "changed": changed, "to": word }),
        )?;
    }
    let numbers: Vec<u64> = refused.iter().map(|(number, _)| *number).collect();
    let mut refused = refused.into_iter();
    let Some((_, first)) = refused.next() else {
        return Ok(());
    };
    for (_, error) in refused {
        let text = format!("bafs: {error:#}");
        eprintln!("{}", terminal_text::sanitize_lines(&text));
    }
    Err(first.context(format!("not {word}: {}", join(&numbers))))
}

async fn list_queue(args: QueueArgs, output: Printer) -> Result<()> {
    let client = ServiceClient::connect(&args.service)?;
    if args.page {
        let opened: PageOpened = client.ask(&QueueRequest::OpenPage).await?;
        return output.print_result(&opened.page, &opened);
    }
    let mut workflows: Vec<WorkflowSummary> = Vec::new();
    let mut after = None;
    loop {
        let has_ended = args.all;
        let page: WorkflowPage = client.ask(&QueueRequest::List { after, has_ended }).await?;
        workflows.extend(page.workflows);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    let lines: Vec<String> = workflows.iter().map(describe_workflow).collect();
    let text = match lines.is_empty() {
        true => "no workflows".to_owned(),
        false => lines.join("\n"),
    };
    output.print_result(&text, &workflows)
}

fn describe_workflow(workflow: &WorkflowSummary) -> String {
    let state = workflow.state.name();
    let Some(details) = &workflow.details else {
        return format!("{:>6}  {state:<9} of another user", workflow.id.0);
    };
    let user = workflow.user.as_deref().unwrap_or_default();
    let mut text = format!(
        "{:>6}  {state:<9} {user:<12} {}  {}",
        workflow.id.0,
        Time(details.submitted_ms).to_utc_text(),
        details.name
    );
    if let Some(share) = details.share {
        let space = format_bytes(share.bytes.into());
        text += &format!(", has {} slots and {space}", share.slots);
    }
    if let Some(reason) = &details.reason {
        text += &format!(": {reason}");
    }
    terminal_text::sanitize_line(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_tell_classes_of_failures_apart() {
        for (code, expected) in [
            (ErrorCode::RightMissing, 3),
            (ErrorCode::TokenInvalid, 3),
            (ErrorCode::NotFound, 4),
            (ErrorCode::WrongState, 5),
            (ErrorCode::NoSpaceBytes, 6),
            (ErrorCode::Unreachable, 75),
            (ErrorCode::Busy, 75),
            (ErrorCode::Malformed, 1),
        ] {
            let error = Error::new(bafs_proto::Error::new(code, "no")).context("asked");
            assert_eq!(exit_code_of(&error), expected, "{code:?}");
        }
        assert_eq!(exit_code_of(&UsageError::from_reason("no")), 2);
    }
}
