use tch::Tensor;

/// Full copies of parameters that are trained and saved with an adapter (`modules_to_save`). A model that
/// offers its parameters ([`AdapterHost::visit_parameters`](crate::AdapterHost::visit_parameters)) owns
/// one.
#[derive(Debug, Default)]
pub struct ModuleCopies {
    pub(crate) entries: Vec<ModuleCopy>,
    /// The adapter whose copies the model computes with.
    pub(crate) active: Option<String>,
    /// The one that it will compute with again when adapters are enabled.
    pub(crate) waiting: Option<String>,
}

#[derive(Debug)]
pub(crate) struct ModuleCopy {
    pub(crate) adapter: String,
    /// Of the parameter.
    pub(crate) name: String,
    pub(crate) copy: Tensor,
    /// The model's own, while the copy is in its place.
    pub(crate) original: Option<Tensor>,
}

impl ModuleCopies {
    /// No copies.
    pub fn new() -> ModuleCopies {
        ModuleCopies::default()
    }

    /// Names of the parameters that `adapter` has copies of.
    pub fn names(&self, adapter: &str) -> Vec<&str> {
        let own = self.entries.iter().filter(|entry| entry.adapter == adapter);
        own.map(|entry| entry.name.as_str()).collect()
    }
}
