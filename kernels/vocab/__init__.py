"""Operations over the vocabulary: the best id, draws with noise, filters."""
