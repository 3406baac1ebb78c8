//! The page: one document, one script and one style sheet, all part of the program; and the login
//! that opens it.

use axum::Router;
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, SET_COOKIE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;

use crate::app::App;
use crate::parameters::Parameters;

const HTML: &str = "text/html; charset=utf-8";
const DOCUMENT: &str = include_str!("page/index.html");
const LOGIN_DOCUMENT: &str = include_str!("page/login.html");
const CLOSED_DOCUMENT: &str = include_str!("page/closed.html");

/// Script and style sheets: path, type and content.
const FILES: [(&str, &str, &str); 4] = [
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_str!("page/page.js"),
    ),
    (
        "/charts.js",
        "text/javascript; charset=utf-8",
        include_str!("page/charts.js"),
    ),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_str!("page/page.css"),
    ),
    (
        "/favicon.svg",
        "image/svg+xml",
        include_str!("page/favicon.svg"),
    ),
];

/// In the document that a login answers with.
const TOKEN_PLACE: &str = "PAGE_TOKEN";

pub(crate) fn router() -> Router<App> {
    let router = Router::new()
        .route("/", get(get_document))
        .route("/login", get(log_in));
    FILES
        .into_iter()
        .fold(router, |router, (path, kind, content)| {
            let file = move || async move { ([(CONTENT_TYPE, kind)], content) };
            router.route(path, get(file))
        })
}

async fn get_document(State(app): State<App>, headers: HeaderMap) -> Response {
    match app.access.has_session(&headers) {
        true => ([(CONTENT_TYPE, HTML)], DOCUMENT).into_response(),
        false => closed(),
    }
}

#[derive(Debug, Deserialize)]
struct LoginQuery {
    code: String,
}

/// Opens a session and leads on to the page. It is a document and no redirection, or browsers would
/// not send the new cookie when the link was in a page of another site.
async fn log_in(State(app): State<App>, Parameters(query): Parameters<LoginQuery>) -> Response {
    let Some(session) = app.access.open_session(&query.code) else {
        return closed();
    };
    let document = LOGIN_DOCUMENT.replace(TOKEN_PLACE, &session.page_token);
    let headers = [
        (CONTENT_TYPE, HTML.to_owned()),
        (SET_COOKIE, session.set_cookie),
    ];
    (headers, document).into_response()
}

fn closed() -> Response {
    (
        StatusCode::UNAUTHORIZED,
        [(CONTENT_TYPE, HTML)],
        CLOSED_DOCUMENT,
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_load_nothing_from_elsewhere() {
        let files = FILES.map(|(_, _, content)| content);
        for text in [DOCUMENT, LOGIN_DOCUMENT, CLOSED_DOCUMENT]
            .into_iter()
            .chain(files)
        {
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for foreign in [
                "http://",
                "https://",
                "//cdn",
                "@import",
                "eval(",
                "innerHTML",
            ] {
                assert!(!text.contains(foreign), "{foreign}");
            }
            // The policy forbids scripts and styles inside the document.
            assert!(!text.contains("<style") && !text.contains(" onclick="));
        }
        assert!(LOGIN_DOCUMENT.contains(TOKEN_PLACE));
    }
}
