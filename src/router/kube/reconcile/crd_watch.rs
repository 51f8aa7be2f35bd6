//! Watches of the kinds of this driver that an upgrade with Helm does not install.

use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock};

use ::kube::Resource;
use ::kube::api::Api;
use ::kube::runtime::watcher;
use serde::de::DeserializeOwned;

use super::watches::{Store, until_served, watch};
use crate::router::kube::InCluster;

/// Watches all objects of a kind, once the cluster has its CRD, and keeps them in `store`. A change causes
/// the next passes of the controllers.
pub(in crate::router::kube) async fn follow<K>(
    cluster: Arc<InCluster>,
    what: &'static str,
    store: fn(&InCluster) -> &RwLock<Store<K>>,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let api = Api::<K>::all(cluster.client.clone());
    until_served(&api, what).await;
    let (states, all) = (Arc::clone(&cluster.following), watcher::Config::default());
    watch(api, all, what, states, move |event| {
        let kept = store(&cluster).write();
        let mut kept = kept.unwrap_or_else(PoisonError::into_inner);
        // The router's own writes of the status do not change the generation.
        let is_same = |old: &K, new: &K| old.meta().generation == new.meta().generation;
        if kept.take(event, Some, is_same) {
            cluster.changes.send_replace(());
        }
    })
    .await;
}
