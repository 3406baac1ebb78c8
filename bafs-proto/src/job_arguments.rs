//! The words of a job's command, which travel in the body of `StartJob`: Linux takes more of them
//! than a head holds.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::codec;
use crate::error::Result;
use crate::message::JobCommand;

/// Arguments and environment.
type ArgumentsAndEnvironment = (Vec<String>, BTreeMap<String, String>);

/// What a command with too many words is told: the limits are those of Linux, with the stack that
/// processes commonly may have.
#[must_use]
pub fn too_long_message(executable: &str) -> String {
    format!(
        "the arguments and the environment of {executable} are too long: Linux takes 128 KiB for \
         each and commonly 2 MiB for all, with 9 bytes more for each; put them into a file of a \
         volume that the job reads"
    )
}

impl JobCommand {
    /// Takes arguments and environment out, as the body of a request.
    ///
    /// # Errors
    /// `Malformed` when they are longer than a body, which is more than Linux commonly takes.
    pub fn move_arguments_to_body(&mut self) -> Result<Bytes> {
        let words: ArgumentsAndEnvironment = (
            std::mem::take(&mut self.arguments),
            std::mem::take(&mut self.environment),
        );
        Ok(codec::encode_body(&words)?.into())
    }

    /// Puts the words of a request's body in their place; an empty body leaves those of the head.
    ///
    /// # Errors
    /// `Malformed` when the body is no such words.
    pub fn read_arguments_from_body(&mut self, body: &[u8]) -> Result<()> {
        if !body.is_empty() {
            (self.arguments, self.environment) =
                codec::decode_body::<ArgumentsAndEnvironment>(body)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    #[test]
    fn long_commands_travel_in_the_body() {
        let command = JobCommand {
            executable: "/bin/sh".to_owned(),
            arguments: vec!["x".repeat(1_000); 1_900],
            environment: BTreeMap::from([("NAME".to_owned(), "y".repeat(100_000))]),
            ..JobCommand::default()
        };
        let mut sent = command.clone();
        let body = sent.move_arguments_to_body().expect("words");
        assert!(codec::encode(&sent).is_ok() && codec::encode(&command).is_err());
        sent.read_arguments_from_body(&body).expect("body");
        assert_eq!(sent, command);
        assert!(sent.read_arguments_from_body(&body[1..]).is_err());
    }

    #[test]
    fn oversized_commands_are_refused() {
        let mut command = JobCommand {
            arguments: vec!["x".repeat(100_000); 50],
            ..JobCommand::default()
        };
        let refused = command.move_arguments_to_body().expect_err("5 MB");
        assert_eq!(refused.code, ErrorCode::Malformed);
    }
}
