"""The names under which Keras saves a distributed optimizer: those of the plain one.

Keras looks up a class in a table of its public classes, then in one of registered custom classes. A
class that is in neither would be saved by its module, which exists only with allstep.
"""

from keras.src import api_export
from keras.src.saving import object_registration


def register_like(made: type, base: type) -> None:
    """Let Keras save objects of `made` as objects of `base`."""
    for known in base.__mro__:
        public = api_export.REGISTERED_OBJS_TO_NAMES.get(known)
        # On torch, Keras's class is a subclass of the public one, with the same name.
        if public is not None and known.__name__ == base.__name__:
            api_export.REGISTERED_OBJS_TO_NAMES[made] = public
            return
    custom = object_registration.GLOBAL_CUSTOM_NAMES.get(base)
    if custom is not None:
        object_registration.GLOBAL_CUSTOM_NAMES[made] = custom
