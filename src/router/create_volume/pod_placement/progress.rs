//! The decisions whose volumes are being created by this router: between the decision and the first
//! record on an agent, nothing else shows where a volume will be.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, MutexGuard};

use super::Place;

/// The namespaces in which decisions are made or in progress.
#[derive(Default)]
pub(in crate::router) struct Choices(Mutex<HashMap<String, Weak<Namespace>>>);

/// The decisions of one namespace, which are made one after the other. All claims of a pod and all
/// pods of a controller are in one namespace.
#[derive(Default)]
pub(super) struct Namespace(AsyncMutex<Begun>);

/// The decisions in progress, by the path of the claim.
#[derive(Default)]
pub(super) struct Begun(HashMap<String, Weak<InProgress>>);

/// A decision whose call has not ended.
pub(super) struct InProgress {
    place: Place,
    _namespace: Arc<Namespace>,
}

impl Choices {
    pub(super) fn namespace(&self, claim: &str) -> Arc<Namespace> {
        let name = claim.split('/').next().unwrap_or_default();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, one| one.strong_count() > 0);
        if let Some(known) = all.get(name).and_then(Weak::upgrade) {
            return known;
        }
        let new = Arc::<Namespace>::default();
        all.insert(name.to_string(), Arc::downgrade(&new));
        new
    }
}

impl Namespace {
    /// Waits until no other decision is being made in the namespace.
    pub(super) async fn lock(&self) -> MutexGuard<'_, Begun> {
        let mut begun = self.0.lock().await;
        begun.0.retain(|_, one| one.strong_count() > 0);
        begun
    }
}

impl Begun {
    /// Where the volume of a claim is about to be created.
    pub(super) fn place(&self, claim: &str) -> Option<Place> {
        let one = self.0.get(claim)?.upgrade()?;
        Some(one.place.clone())
    }

    /// Records a decision until the result is dropped.
    pub(super) fn insert(
        &mut self,
        claim: &str,
        place: &Place,
        namespace: Arc<Namespace>,
    ) -> Arc<InProgress> {
        let one = Arc::new(InProgress {
            place: place.clone(),
            _namespace: namespace,
        });
        self.0.insert(claim.to_string(), Arc::downgrade(&one));
        one
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_decision_is_seen_until_its_call_ends() {
        let choices = Choices::default();
        let place = Place {
            node: "a".into(),
            home: "home-a".into(),
        };
        let namespace = choices.namespace("shop/db");
        let mut begun = namespace.lock().await;
        let one = begun.insert("shop/db", &place, namespace.clone());
        drop(begun);
        drop(namespace);
        let again = choices.namespace("shop/log");
        assert_eq!(again.lock().await.place("shop/db"), Some(place));
        assert_eq!(
            choices.namespace("other/db").lock().await.place("shop/db"),
            None
        );
        drop(one);
        assert_eq!(again.lock().await.place("shop/db"), None);
        drop(again);
        let _other = choices.namespace("other/db");
        assert_eq!(choices.0.lock().unwrap().len(), 1, "nothing is left behind");
    }
}
