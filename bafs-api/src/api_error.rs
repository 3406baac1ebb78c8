//! Errors as HTTP says them: a status, and JSON with code, class and advice.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bafs_proto::{Error, ErrorClass, ErrorCode};
use serde::Serialize;

/// The result of a request.
pub(crate) type ApiResult<T> = Result<T, ApiError>;

/// Why a request fails.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    status: StatusCode,
    error: Error,
    advice: &'static str,
}

#[derive(Serialize)]
struct ErrorBody<'e> {
    error: ErrorFields<'e>,
}

#[derive(Serialize)]
struct ErrorFields<'e> {
    /// Name of the code, as the reference of errors lists it.
    code: String,
    /// Who acts on it.
    class: String,
    /// The status of the response.
    status: u16,
    message: &'e str,
    advice: &'e str,
}

impl ApiError {
    /// An error with a status and advice of its own.
    pub(crate) fn new(
        status: StatusCode,
        code: ErrorCode,
        message: impl Into<String>,
        advice: &'static str,
    ) -> Self {
        Self {
            status,
            error: Error::new(code, message),
            advice,
        }
    }

    /// A request that does not make sense.
    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Error::new(ErrorCode::Malformed, message).into()
    }

    /// Something that is not there.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Error::new(ErrorCode::NotFound, message).into()
    }

    /// The status of the response.
    #[cfg(test)]
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let (status, advice) = respond_to_code(error.code);
        Self {
            status,
            error,
            advice,
        }
    }
}

/// The status for an error of a source, and what the reader can do.
fn respond_to_code(code: ErrorCode) -> (StatusCode, &'static str) {
    match code {
        ErrorCode::NotFound => (
            StatusCode::NOT_FOUND,
            "List what there is with GET /api/v1/runs.",
        ),
        ErrorCode::Malformed | ErrorCode::BadPath => (
            StatusCode::BAD_REQUEST,
            "Compare the request with /api/v1/openapi.json.",
        ),
        ErrorCode::WrongState | ErrorCode::Conflict => (
            StatusCode::CONFLICT,
            "Look at the state of the run, and repeat the request when it fits.",
        ),
        ErrorCode::Unsupported => (
            StatusCode::NOT_IMPLEMENTED,
            "Use a program that serves this: a queue needs `bafs scheduler`.",
        ),
        ErrorCode::TokenInvalid | ErrorCode::TokenExpired => (
            StatusCode::UNAUTHORIZED,
            "Open the login link that the program printed, or send its bearer token.",
        ),
        ErrorCode::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "Send less in one request."),
        _ => match code.class() {
            ErrorClass::Transient => (
                StatusCode::SERVICE_UNAVAILABLE,
                "Repeat the request in a few seconds.",
            ),
            ErrorClass::Denied => (
                StatusCode::FORBIDDEN,
                "Ask the owner of the run, or an operator.",
            ),
            ErrorClass::VolumeLost => (StatusCode::GONE, "Create it again."),
            ErrorClass::NoSpace => (
                StatusCode::INSUFFICIENT_STORAGE,
                "Free space, or ask for less.",
            ),
            ErrorClass::Invalid => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "Change the request: repeating it does not help.",
            ),
        },
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let fields = ErrorFields {
            code: format!("{:?}", self.error.code),
            class: format!("{:?}", self.error.class()),
            status: self.status.as_u16(),
            message: &self.error.detail,
            advice: self.advice,
        };
        (self.status, Json(ErrorBody { error: fields })).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_status_and_advice() {
        for &code in ErrorCode::ALL {
            let error = ApiError::from(Error::new(code, "x"));
            assert!(error.status().is_client_error() || error.status().is_server_error());
            assert!(error.advice.ends_with('.'), "{code:?}");
        }
        let missing = ApiError::not_found("no run");
        assert_eq!(missing.status(), StatusCode::NOT_FOUND);
    }
}
