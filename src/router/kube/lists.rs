//! Lists of the API server, read page by page.

use ::kube::Error as KubeError;
use ::kube::api::{Api, ListParams, ObjectList};
use serde::de::DeserializeOwned;

use super::ask;
use crate::error::Result;

const OBJECTS_PER_PAGE: u32 = 500;

/// All objects of a kind, page by page.
pub(super) async fn all<K>(what: &str, api: &Api<K>, params: ListParams) -> Result<Vec<K>>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut params = params.limit(OBJECTS_PER_PAGE);
    let mut objects = Vec::new();
    loop {
        let page = ask(what, api.list(&params)).await?;
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// The first pages of a list, at most `max_pages`, and whether there are more; `None` if the cluster does
/// not have the kind.
pub(super) async fn first_pages<T: Clone, F>(
    what: &str,
    mut params: ListParams,
    max_pages: usize,
    list: impl Fn(ListParams) -> F,
) -> Result<Option<(Vec<T>, bool)>>
where
    F: Future<Output = Result<ObjectList<T>, KubeError>>,
{
    let mut found = Vec::new();
    for _ in 0..max_pages {
        let page = async {
            match list(params.clone()).await {
                Ok(page) => Ok(Some(page)),
                Err(KubeError::Api(status)) if status.code == 404 => Ok(None),
                Err(error) => Err(error),
            }
        };
        let Some(page) = ask(what, page).await? else {
            return Ok(None);
        };
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(Some((found, false))),
        }
    }
    Ok(Some((found, true)))
}
